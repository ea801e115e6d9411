#include "graphs.hpp"

#include "streams.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define HAS_GRAPHS 1
#endif

namespace graphs {
namespace {

using at::Tensor;
using c10::Storage;

constexpr auto kSecond = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xFF;  // NaN, of every floating dtype

void nothing(void*) {}

struct Block {
  size_t bytes;
  bool is_alive;
};

struct Use {
  Storage storage;
  std::string by;
};

struct Recorded {
  std::vector<std::function<void()>> calls;
  std::unordered_map<const void*, Storage> made;              // by kernels, within the capture
  std::unordered_map<const void*, Block> allocated;           // by the allocator, within it
  std::unordered_map<const void*, std::string> before;        // memory from before the capture, as it was
  std::unordered_map<const void*, Use> used;                  // likewise, that a call reads or writes
  Tensor generator;

  bool holds(const void* memory) const {
    return allocated.count(memory) || made.count(memory);
  }
  ~Recorded() {
    calls.clear();
    for (auto& [memory, block] : allocated)
      if (!block.is_alive) std::free(const_cast<void*>(memory));
  }
};

std::recursive_mutex lock;
std::atomic<Recorded*> now{nullptr};
std::vector<Recorded*> all;  // that keep memory
std::atomic<bool> any{false};

at::Generator generator() {
  return at::globalContext().defaultGenerator(c10::Device(kSecond, 0));
}

void begin(Recorded& recorded) {
  std::lock_guard guard(lock);
  TORCH_CHECK(!now, "second: a graph is being captured already");
  recorded.generator = generator().get_state();
  all.push_back(&recorded);
  any = true;
  streams::capture_begins();
  now = &recorded;
}

void end(Recorded& recorded) {
  std::lock_guard guard(lock);
  now = nullptr;
  for (auto& [memory, bytes] : recorded.before)
    if (recorded.used.at(memory).storage.data() == memory) std::memcpy(const_cast<void*>(memory), bytes.data(), bytes.size());
  recorded.before.clear();
  for (auto& [memory, block] : recorded.allocated) std::memset(const_cast<void*>(memory), kPoison, block.bytes);
  for (auto& [memory, storage] : recorded.made) std::memset(const_cast<void*>(memory), kPoison, storage.nbytes());
  generator().set_state(recorded.generator);
  streams::capture_ends();
}

void run(const Recorded& recorded) {
  TORCH_CHECK(!now, "second: a graph is run while another one is captured");
  for (auto& [memory, use] : recorded.used)
    TORCH_CHECK(use.storage.data() == memory && use.storage.use_count() > 1, "second: a graph runs ", use.by, " on memory of ",
                use.storage.nbytes(), " bytes that was given back since it was captured");
  for (auto& call : recorded.calls) call();
}

void forget(Recorded& recorded) {
  std::lock_guard guard(lock);
  all.erase(std::remove(all.begin(), all.end(), &recorded), all.end());
}

}  // namespace

bool capturing() {
  return now;
}

void forbid(const char* what) {
  TORCH_CHECK(!now, "second: operation not permitted when stream is capturing: ", what);
}

Tensor frozen(const Tensor& tensor, const std::string& by) {
  if (!tensor.defined() || tensor.device().type() != kSecond || !tensor.has_storage()) return tensor;
  std::lock_guard guard(lock);
  const Storage& storage = tensor.storage();
  void* memory = const_cast<void*>(storage.data());
  if (memory && !now.load()->holds(memory)) now.load()->used.emplace(memory, Use{storage, by});
  writes(tensor);  // it may: the schema of batch normalization does not say what it does to its buffers
  Storage same(Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(memory, memory, &nothing, storage.device()), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

void record(std::function<void()> again) {
  std::lock_guard guard(lock);
  now.load()->calls.push_back(std::move(again));
}

void writes(const Tensor& tensor) {
  if (!now || !tensor.defined() || !tensor.has_storage() || tensor.device().type() != kSecond) return;
  std::lock_guard guard(lock);
  Recorded& recorded = *now.load();
  const Storage& storage = tensor.storage();
  const void* memory = storage.data();
  if (!memory || recorded.holds(memory) || recorded.before.count(memory)) return;
  recorded.used.emplace(memory, Use{storage, "a write"});
  recorded.before.emplace(memory, std::string(static_cast<const char*>(memory), storage.nbytes()));
}

void made(const Storage& storage) {
  if (!now) return;
  std::lock_guard guard(lock);
  if (storage.data()) now.load()->made.emplace(storage.data(), storage);
}

void made(void* memory, size_t bytes) {
  if (!now) return;
  std::lock_guard guard(lock);
  now.load()->allocated.emplace(memory, Block{bytes, true});
}

bool keeps(void* memory) {
  if (!any) return false;
  std::lock_guard guard(lock);
  for (Recorded* recorded : all) {
    const auto found = recorded->allocated.find(memory);
    if (found == recorded->allocated.end()) continue;
    found->second.is_alive = false;
    return true;
  }
  return false;
}

#ifdef HAS_GRAPHS

struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override {
    reset();
  }
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    begin(*(recorded_ = std::make_unique<Recorded>()));
  }
  void capture_end() override {
    end(*recorded_);
  }
  void instantiate() override {}
  void replay() override {
    run(*recorded_);
  }
  void reset() override {
    if (recorded_) forget(*recorded_);
    recorded_.reset();
  }
  at::MempoolId_t pool() const override {
    return {0, 1};
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  std::unique_ptr<Recorded> recorded_;
};

#endif

}  // namespace graphs

#ifdef HAS_GRAPHS
namespace at {
REGISTER_GRAPH_IMPL(SECOND, graphs::Graph);
}
#endif
