// Which uses of memory come one after the other. A stream runs what it is given in order; nothing else is in order but by
// an event, by a wait of the host, or by `record_stream` where memory is given back. Here all is computed at once, in the
// order of calls, so that a race shows nowhere in the numbers: it is found by clocks, one per stream, of what each stream
// has come after (vector clocks). Copies between the device and pinned memory that nobody waited for are made late: what
// arrives there is poison until the host has waited, and what is sent from there must not change until then.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace streams {

using Clock = std::vector<uint64_t>;  // by stream: how many of its operations are before this

// Whether there is a stream besides the device's own: until then all is in order.
bool are_there();
c10::StreamId made();

c10::StreamId current();
c10::StreamId exchange(c10::StreamId next);

// What the event stands for, or what the host has waited for.
Clock recorded(c10::StreamId stream);
void wait(c10::StreamId stream, const Clock& event);
void host_waits(const Clock& event);
void host_waits(c10::StreamId stream);
void host_waits_for_all();

// The operation that the current stream is given now.
class Operation {
 public:
  explicit Operation(const char* name);
  // Raises where somebody else's use is not in order with it.
  void reads(const at::Tensor& tensor);
  void writes(const at::Tensor& tensor);

 private:
  const char* name_;
  c10::StreamId stream_;
  uint64_t time_;
  bool counts_;
  void uses(const at::Tensor& tensor, bool written);
};

// What is given to the current stream, and to those that wait for it and that it waits for, is a graph's.
void capture_begins();
void capture_ends();

// Memory of the device, by where it begins.
void allocated(const void* memory);
void released(const void* memory);
void recorded_on(const void* memory, c10::StreamId stream);

// Copies that the host does not wait for, given to the current stream: `down` into pinned memory, `up` from there.
void copied_down(const at::Tensor& device, const at::Tensor& pinned);
void copied_up(const at::Tensor& pinned);

// What was found where nothing can be raised; it is forgotten.
std::vector<std::string> found();

}  // namespace streams
