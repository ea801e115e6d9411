#include "streams.hpp"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <utility>

namespace streams {
namespace {

using at::Tensor;

constexpr size_t kMostInFlight = 32;  // copies from pinned memory that are still looked at
constexpr unsigned char kPoison = 0xFF;  // NaN, of every floating dtype

struct Use {
  const char *first, *end;
  c10::StreamId stream;
  uint64_t time;
  bool written;
  const char* name;
};

struct Memory {
  c10::StreamId from;  // the stream whose memory it is, and becomes again
  std::set<c10::StreamId> recorded;
  std::vector<Use> uses;
};

// A copy between the device and pinned memory, asked for and not waited for. `bytes`: what arrives, or was sent.
struct Copy {
  Tensor pinned;  // alive, as torch's allocator keeps it
  std::string bytes;
  c10::StreamId stream;
  uint64_t time;

  char* data() const {
    return static_cast<char*>(pinned.data_ptr());
  }
  bool meets(const Tensor& other) const {
    const char* first = static_cast<const char*>(other.data_ptr());
    return first < data() + bytes.size() && data() < first + other.nbytes();
  }
};

std::recursive_mutex lock;
std::atomic<bool> several{false};
std::atomic<c10::StreamId> last{0};
thread_local c10::StreamId now = 0;
uint64_t began = 0;  // of the device's own stream, when the first other one was made
std::map<c10::StreamId, Clock> clocks;
Clock host;
std::unordered_map<const void*, Memory> memories;
std::deque<Copy> down, up;
std::vector<std::string> races;
c10::StreamId captured = -1;  // by a graph, since this operation of its own
uint64_t captured_since = 0;

uint64_t at(const Clock& clock, c10::StreamId stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

std::string named(c10::StreamId stream) {
  return stream ? "stream " + std::to_string(stream) : "the device's own stream";
}

std::string race(const Use& before, const char* name, c10::StreamId stream, bool written) {
  std::ostringstream text;
  text << "second: memory is " << (written ? "written" : "read") << " by " << name << " on " << named(stream) << ", and was "
       << (before.written ? "written" : "read") << " by " << before.name << " on " << named(before.stream)
       << ", without an event or a wait between them";
  return text.str();
}

Memory& of(const void* memory) {
  auto found = memories.find(memory);
  if (found == memories.end()) {
    // From before there were streams: the device's own has written it.
    const auto* all = static_cast<const char*>(nullptr);
    found = memories.emplace(memory, Memory{0, {}, {{all, all + PTRDIFF_MAX, 0, began, true, "what came before"}}}).first;
  }
  return found->second;
}

// The copies that are over, by what the host has waited for.
void deliver(Copy& copy) {
  const bool intact =
      std::all_of(copy.data(), copy.data() + copy.bytes.size(), [](char c) { return static_cast<unsigned char>(c) == kPoison; });
  std::memcpy(copy.data(), copy.bytes.data(), copy.bytes.size());
  if (!intact) races.push_back("second: the host wrote to pinned memory while a copy to it was in flight");
}

void over(const Copy& copy) {
  if (std::memcmp(copy.data(), copy.bytes.data(), copy.bytes.size()))
    races.push_back("second: pinned memory was written while a copy from it was in flight");
}

template <typename End>
void end(std::deque<Copy>& copies, const Clock& known, End ended) {
  for (auto copy = copies.begin(); copy != copies.end();)
    if (at(known, copy->stream) >= copy->time) {
      ended(*copy);
      copy = copies.erase(copy);
    } else {
      ++copy;
    }
}

// Ends those that `clock` comes after and that meet this memory. Raises where one is not in order with it.
template <typename End>
void take_turn(std::deque<Copy>& copies, const Tensor& pinned, const Clock& clock, End ended, const char* what) {
  for (auto copy = copies.begin(); copy != copies.end();)
    if (!copy->meets(pinned)) {
      ++copy;
    } else {
      TORCH_CHECK(at(clock, copy->stream) >= copy->time, "second: ", what, " on ", named(now), " meets one on ", named(copy->stream),
                  " over the same pinned memory, without an event between them");
      ended(*copy);
      copy = copies.erase(copy);
    }
}

// The clock of a stream that is given something now.
Clock& next(c10::StreamId stream) {
  Clock& clock = clocks[stream];
  join(clock, host);
  if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1);
  clock[stream]++;
  return clock;
}

}  // namespace

bool are_there() {
  return several;
}

c10::StreamId made() {
  std::lock_guard guard(lock);
  if (!several) began = next(0)[0];
  several = true;
  return ++last;
}

c10::StreamId current() {
  return now;
}

c10::StreamId exchange(c10::StreamId next) {
  return std::exchange(now, next);
}

Clock recorded(c10::StreamId stream) {
  std::lock_guard guard(lock);
  return next(stream);
}

void wait(c10::StreamId stream, const Clock& event) {
  std::lock_guard guard(lock);
  join(clocks[stream], event);
}

void host_waits(const Clock& event) {
  std::lock_guard guard(lock);
  join(host, event);
  end(down, host, deliver);
  end(up, host, over);
}

void host_waits(c10::StreamId stream) {
  host_waits(recorded(stream));
}

void host_waits_for_all() {
  for (c10::StreamId stream = 0; stream <= last; stream++) host_waits(stream);
}

Operation::Operation(const char* name) : name_(name), stream_(now), time_(0), counts_(several) {
  if (!counts_) return;
  std::lock_guard guard(lock);
  const Clock& clock = next(stream_);
  time_ = clock[stream_];
  TORCH_CHECK(captured < 0 || at(clock, captured) >= captured_since, "second: ", name_, " is given to ", named(stream_),
              " while a graph is captured that this stream has no part in: it does not wait for the one that is captured");
}

void Operation::reads(const Tensor& tensor) {
  uses(tensor, false);
}

void Operation::writes(const Tensor& tensor) {
  uses(tensor, true);
}

void Operation::uses(const Tensor& tensor, bool written) {
  if (!counts_ || !tensor.defined() || !tensor.numel() || !tensor.has_storage()) return;
  std::lock_guard guard(lock);
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  const auto* end = first + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  const Clock& clock = clocks[stream_];
  auto& uses = of(tensor.storage().data()).uses;
  for (auto use = uses.begin(); use != uses.end();) {
    const bool meets = first < use->end && use->first < end, conflicts = meets && (written || use->written);
    const bool is_before = at(clock, use->stream) >= use->time;
    TORCH_CHECK(!conflicts || is_before, race(*use, name_, stream_, written));
    // What comes after this use comes after that one, too.
    const bool covered = first <= use->first && use->end <= end;
    if (covered && is_before && (written || (!use->written && use->stream == stream_)))
      use = uses.erase(use);
    else
      ++use;
  }
  uses.push_back({first, end, stream_, time_, written, name_});
}

void capture_begins() {
  std::lock_guard guard(lock);
  captured = now;
  captured_since = next(now)[now];
}

void capture_ends() {
  std::lock_guard guard(lock);
  const Clock& clock = clocks[std::exchange(captured, -1)];
  for (auto& [stream, own] : clocks)
    TORCH_CHECK(at(own, now) < captured_since || at(clock, stream) >= at(own, stream), "second: ", named(stream),
                " has a part in a graph, and the one that is captured does not wait for its end");
}

void allocated(const void* memory) {
  if (!several || !memory) return;
  std::lock_guard guard(lock);
  // Whose memory it was before may still be at work on this stream, as with CUDA's allocator.
  const auto* all = static_cast<const char*>(nullptr);
  Use before{all, all + PTRDIFF_MAX, now, at(clocks[now], now), true, "whoever had it before"};
  memories.insert_or_assign(memory, Memory{now, {}, {std::move(before)}});
}

void released(const void* memory) {
  if (!several || !memory) return;
  std::lock_guard guard(lock);
  const auto found = memories.find(memory);
  if (found == memories.end()) return;
  const Memory held = std::move(found->second);
  memories.erase(found);
  Clock clock = clocks[held.from];
  join(clock, host);
  for (const Use& use : held.uses)
    if (use.stream != held.from && !held.recorded.count(use.stream) && at(clock, use.stream) < use.time) {
      races.push_back("second: memory of " + named(held.from) + " was given back after " + use.name + " on " + named(use.stream) +
                      " used it, without record_stream or an event between them");
      return;
    }
}

void recorded_on(const void* memory, c10::StreamId stream) {
  if (!several) return;
  std::lock_guard guard(lock);
  of(memory).recorded.insert(stream);
}

void copied_down(const Tensor& device, const Tensor& pinned) {
  std::lock_guard guard(lock);
  const Clock& clock = next(now);
  take_turn(down, pinned, clock, deliver, "a copy to the host");
  take_turn(up, pinned, clock, over, "a copy to the host");
  Copy copy{pinned, std::string(static_cast<const char*>(device.data_ptr()), device.nbytes()), now, clock[now]};
  std::memset(copy.data(), kPoison, copy.bytes.size());
  down.push_back(std::move(copy));
}

void copied_up(const Tensor& pinned) {
  std::lock_guard guard(lock);
  const Clock& clock = next(now);
  take_turn(down, pinned, clock, deliver, "a copy from the host");
  if (up.size() >= kMostInFlight) {
    over(up.front());
    up.pop_front();
  }
  up.push_back({pinned, std::string(static_cast<const char*>(pinned.data_ptr()), pinned.nbytes()), now, clock[now]});
}

std::vector<std::string> found() {
  std::lock_guard guard(lock);
  return std::exchange(races, {});
}

}  // namespace streams
