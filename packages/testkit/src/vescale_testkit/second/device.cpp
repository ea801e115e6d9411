// A device in host memory: PrivateUse1 "second". Its kernels are the CPU's, its rules are a GPU's: tensors of two devices
// do not mix, random numbers come from a generator of its own, and whatever makes the host wait for it is told to Python.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "graphs.hpp"
#include "streams.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::IntArrayRef;
using c10::IValue;
using c10::Storage;

namespace {

constexpr auto kSecond = c10::DeviceType::PrivateUse1;

// --- what makes the host wait ---------------------------------------------------------------------------------------

py::object* on_wait = nullptr;  // called with what waited; None: nobody listens
bool listening = false;

void tell(const char* what) {
  graphs::forbid(what);
  if (!listening) return;
  py::gil_scoped_acquire gil;
  (*on_wait)(what);
}

// The host waits for all that the current stream was given.
void note(const char* what) {
  streams::host_waits(streams::current());
  tell(what);
}

// --- memory ---------------------------------------------------------------------------------------------------------

// Fresh memory is not zero, as on a GPU: a kernel that forgets to write shows.
struct DeviceAllocator final : c10::Allocator {
  static void release(void* memory) {
    if (graphs::keeps(memory)) return;
    streams::released(memory);
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes) {
      TORCH_CHECK(posix_memalign(&memory, 512, bytes) == 0, "second: out of memory, ", bytes, " bytes");
      std::memset(memory, 0xA5, std::min<size_t>(bytes, 1 << 16));
      streams::allocated(memory);
      graphs::made(memory, bytes);
    }
    return {memory, memory, &release, Device(kSecond, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
DeviceAllocator device_allocator;

// Host memory that a copy need not wait for.
struct PinnedAllocator final : c10::Allocator {
  static std::mutex& lock() {
    static std::mutex mutex;
    return mutex;
  }
  static std::map<const char*, size_t>& ranges() {
    static std::map<const char*, size_t> held;
    return held;
  }
  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> guard(lock());
      ranges().erase(static_cast<const char*>(memory));
    }
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 512, std::max<size_t>(bytes, 1)) == 0, "second: out of pinned memory");
    std::lock_guard<std::mutex> guard(lock());
    ranges()[static_cast<const char*>(memory)] = std::max<size_t>(bytes, 1);
    return {memory, memory, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(lock());
    auto next = ranges().upper_bound(static_cast<const char*>(data));
    if (next == ranges().begin()) return false;
    --next;
    return static_cast<const char*>(data) < next->first + next->second;
  }
};
PinnedAllocator pinned_allocator;

void grow(const Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  auto fresh = device_allocator.allocate(bytes);
  if (impl->nbytes() && bytes) std::memcpy(fresh.get(), storage.data(), std::min(bytes, impl->nbytes()));
  impl->set_data_ptr(std::move(fresh));
  impl->set_nbytes(bytes);
}

// --- streams and events ---------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(kSecond, 0), id);
  }
  static streams::Clock* clock_of(void* event) {
    return static_cast<streams::Clock*>(event);
  }
  c10::DeviceType type() const override {
    return kSecond;
  }
  Device exchangeDevice(Device) const override {
    return Device(kSecond, 0);
  }
  Device getDevice() const override {
    return Device(kSecond, 0);
  }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override {
    return stream(streams::current());
  }
  c10::Stream getDefaultStream(Device) const override {
    return stream(0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(Device, int) const override {
    return stream(streams::made());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(streams::exchange(next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new streams::Clock();
    *clock_of(*event) = streams::recorded(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) streams::wait(stream.id(), *clock_of(event));
  }
  bool queryEvent(void* event) const override {
    graphs::forbid("query an event");
    if (event) streams::host_waits(*clock_of(event));
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete clock_of(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    graphs::forbid("query a stream");
    streams::host_waits(stream.id());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    streams::host_waits(stream.id());
    tell("synchronize a stream");
  }
  void synchronizeEvent(void* event) const override {
    if (event) streams::host_waits(*clock_of(event));
    tell("synchronize an event");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    streams::host_waits_for_all();
    tell("synchronize the device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    streams::recorded_on(memory.get(), stream.id());
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 0;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- random numbers: the CPU's sequence, from a generator of the device's own -----------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit DeviceGenerator(at::Generator generator)
      : c10::GeneratorImpl(Device(kSecond, 0), c10::DispatchKeySet(DispatchKey::PrivateUse1)),
        inner(std::move(generator)) {}
  void set_current_seed(uint64_t seed) override {
    graphs::forbid("the state of a generator");
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "second: its generator has no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "second: its generator has no offset");
  }
  uint64_t current_seed() const override {
    graphs::forbid("the state of a generator");
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    graphs::forbid("the state of a generator");
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    graphs::forbid("the state of a generator");
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(inner.clone());
  }
};

at::Generator& default_generator() {
  static at::Generator generator =
      at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator(c10::default_rng_seed_val));
  return generator;
}

at::Generator inner_of(const std::optional<at::Generator>& given) {
  if (!given || !given->defined()) return static_cast<DeviceGenerator*>(default_generator().unsafeGetGeneratorImpl())->inner;
  TORCH_CHECK(given->device().type() == kSecond, "Expected a 'second' device type for generator but found '",
              given->device().type(), "'");
  return static_cast<DeviceGenerator*>(given->unsafeGetGeneratorImpl())->inner;
}

// --- the CPU's view of a device tensor, and back -----------------------------------------------------------------------

// What a storage keeps alive, whose memory it has.
void let_go(void* held) {
  delete static_cast<Storage*>(held);
}

// Of the device, in memory that a kernel of the CPU has made.
void give_back(void* held) {
  streams::released(static_cast<Storage*>(held)->data());
  let_go(held);
}

c10::DataPtr kept_alive(const Storage& storage, Device device) {
  const bool is_made = device.type() == kSecond;
  if (is_made) streams::allocated(storage.data());
  return c10::DataPtr(const_cast<void*>(storage.data()), new Storage(storage), is_made ? &give_back : &let_go, device);
}

Storage alias(const Storage& storage, Device device, c10::Allocator* allocator) {
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), kept_alive(storage, device), allocator, true);
}

Tensor over(const Storage& storage, const Tensor& like, DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

// Storages of one call in both guises: what aliased before a kernel aliases after it.
class Views {
 public:
  Tensor on_cpu(const Tensor& tensor) {
    const auto* wanted = tensor.storage().unsafeGetStorageImpl();
    for (auto& [device, cpu] : pairs_)
      if (device.unsafeGetStorageImpl() == wanted) return over(cpu, tensor, DispatchKey::CPU);
    auto cpu = alias(tensor.storage(), Device(c10::kCPU), c10::GetCPUAllocator());
    pairs_.emplace_back(tensor.storage(), cpu);
    return over(cpu, tensor, DispatchKey::CPU);
  }
  Tensor on_device(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
    const auto* wanted = tensor.storage().unsafeGetStorageImpl();
    for (auto& [device, cpu] : pairs_)
      if (cpu.unsafeGetStorageImpl() == wanted) return over(device, tensor, DispatchKey::PrivateUse1);
    auto device = alias(tensor.storage(), Device(kSecond, 0), &device_allocator);
    graphs::made(tensor.storage());
    pairs_.emplace_back(device, tensor.storage());
    return over(device, tensor, DispatchKey::PrivateUse1);
  }

 private:
  std::vector<std::pair<Storage, Storage>> pairs_;
};

Tensor on_cpu(const Tensor& tensor) {
  return Views().on_cpu(tensor);
}

// Operators that take CPU tensors beside a GPU's: indices (which are copied to it), and copies.
const std::unordered_set<std::string> takes_both = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_copy_from"};

// Operators whose kernel on a GPU reads a result on the host, for a size or a check.
const std::unordered_set<std::string> reads_back = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::equal",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_dim_consecutive", "aten::unique_consecutive",
    "aten::bincount", "aten::segment_reduce", "aten::is_nonzero", "aten::multinomial",
    "aten::multinomial.out", "aten::_linalg_check_errors", "aten::_amp_update_scale"};

bool is_mask(const std::optional<Tensor>& index) {
  return index && index->defined() && (index->scalar_type() == c10::kBool || index->scalar_type() == c10::kByte);
}

// What an operator waits for, if it does; `inputs` are its arguments as they were given.
const char* awaited(const std::string& name, const IValue* inputs) {
  if (name == "aten::repeat_interleave.Tensor") return inputs[1].isNone() ? "repeat_interleave" : nullptr;
  const bool gathers = name == "aten::index.Tensor" || name == "aten::index.Tensor_out";
  if (gathers || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    const auto indices = inputs[1].toOptionalTensorVector();
    int given = 0;
    bool masked = false, from_host = false;
    for (const std::optional<Tensor>& index : indices) {
      if (!index || !index->defined()) continue;
      given++;
      masked |= is_mask(index);
      from_host |= index->device().type() == c10::kCPU;
    }
    if (from_host) return "index by a CPU tensor";
    // One mask and one value is a masked fill, which needs no sizes.
    if (masked && (gathers || given > 1 || inputs[2].toTensor().numel() != 1))
      return "index by a mask";
    return nullptr;
  }
  return reads_back.count(name) ? name.c_str() + 6 : nullptr;
}

// The sizes, strides and memory that a kernel gave to an argument it resized.
void take_over(const Tensor& device, const Tensor& cpu) {
  const bool moved = cpu.storage().data() != device.storage().data();
  if (!moved && cpu.sizes() == device.sizes() && cpu.strides() == device.strides() &&
      cpu.storage_offset() == device.storage_offset())
    return;
  if (moved) {
    graphs::made(cpu.storage());
    device.storage().unsafeGetStorageImpl()->set_data_ptr(kept_alive(cpu.storage(), Device(kSecond, 0)));
    device.storage().unsafeGetStorageImpl()->set_nbytes(cpu.storage().nbytes());
  }
  device.unsafeGetTensorImpl()->set_storage_offset(cpu.storage_offset());
  device.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
}

// A GPU's kernel that reads beyond a table ends the use of the device by its process: nobody can catch it and go on.
std::string asserted;

void check_alive() {
  TORCH_CHECK(asserted.empty(), "second device: device-side assert triggered: ", asserted);
}

// Whether an error is a kernel's about the values of indices, of which the host knows nothing on a GPU.
bool is_of_values(const std::string& message) {
  return message.find("out of range in self") != std::string::npos || message.find("is out of bounds") != std::string::npos;
}

const std::unordered_set<std::string> looks_up = {
    "aten::embedding", "aten::embedding_dense_backward", "aten::_embedding_bag", "aten::_embedding_bag_forward_only",
    "aten::gather", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::index_select",
    "aten::index_add", "aten::index_add_", "aten::index_copy", "aten::index_copy_", "aten::index_fill", "aten::index_fill_",
    "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_", "aten::scatter_reduce", "aten::scatter_reduce_",
    "aten::take", "aten::put_", "aten::nll_loss_forward", "aten::nll_loss2d_forward"};

// For a graph: an argument as it is at the addresses that it has now; a number of the host's is read once.
IValue frozen(const IValue& value, const std::string& by) {
  if (value.isTensor()) {
    const Tensor tensor = value.toTensor();
    if (!tensor.defined() || !tensor.is_cpu()) return graphs::frozen(tensor, by);
    const Tensor number = tensor.clone();
    number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return number;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(graphs::frozen(tensor, by));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(graphs::frozen(*tensor, by)) : tensor);
    return list;
  }
  return value;
}

// What a graph computes goes where it went when it was captured.
void refill(const Tensor& kept, const Tensor& found) {
  if (kept.defined() && kept.numel() && kept.storage().data() != found.storage().data()) on_cpu(kept).copy_(on_cpu(found));
}

// Every operator without a kernel here: the CPU's, on the same memory.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_alive();
  const auto& schema = op.schema();
  const auto name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  const bool kept = graphs::capturing();
  if (const char* what = listening || kept ? awaited(name, stack->data() + begin) : nullptr) note(what);
  torch::jit::Stack asked;
  if (kept)
    for (size_t i = begin; i < stack->size(); i++) asked.push_back(frozen((*stack)[i], name));
  Views views;
  std::vector<std::pair<Tensor, Tensor>> given;  // in both guises
  const bool both = takes_both.count(name);
  streams::Operation operation(op.operator_name().name.c_str());
  bool written = false;
  auto take = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() == kSecond) {
      written ? operation.writes(tensor) : operation.reads(tensor);
      if (written) graphs::writes(tensor);
      given.emplace_back(tensor, views.on_cpu(tensor));
      return given.back().second;
    }
    TORCH_CHECK(
        tensor.device().type() == c10::kMeta || tensor.dim() == 0 || both,
        "Expected all tensors to be on the same device, but found at least two devices, second:0 and ", tensor.device(),
        "! (a tensor of shape ", tensor.sizes(), ", in ", name, ")");
    return tensor;
  };
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    const auto* alias_info = schema.arguments()[i].alias_info();
    written = alias_info && alias_info->isWrite();
    if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(take(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(take(*tensor)) : tensor);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kSecond) {
      value = Device(c10::kCPU);
    } else if (schema.arguments()[i].name() == "generator") {
      value = value.isNone() ? inner_of(std::nullopt) : inner_of(value.toGenerator());
    }
  }
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {
    if (!looks_up.count(schema.name()) || !is_of_values(error.msg())) throw;
    asserted = name + ": " + error.msg();
    check_alive();
  }
  for (auto& [device, cpu] : given) take_over(device, cpu);
  auto made = [&](const Tensor& result) {
    Tensor tensor = views.on_device(result);
    // A view of an argument is no use of it.
    const bool is_view = std::any_of(given.begin(), given.end(), [&](const auto& pair) {
      return tensor.defined() && tensor.has_storage() && pair.first.storage().data() == tensor.storage().data();
    });
    if (!is_view && tensor.defined() && tensor.device().type() == kSecond) operation.writes(tensor);
    return tensor;
  };
  const auto& returns = schema.returns();
  const auto first = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); i++) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      const Tensor result = value.toTensor();
      const auto* written = returns[i].alias_info();
      const Tensor* own = nullptr;
      if (written && written->isWrite())
        for (auto& [device, cpu] : given)
          if (cpu.is_same(result)) own = &device;
      value = own ? *own : made(result);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(made(tensor));
      value = list;
    }
  }
  if (!kept) return;
  torch::jit::Stack answered;
  for (size_t i = first; i < stack->size(); i++) answered.push_back(frozen((*stack)[i], name));
  graphs::record([op, asked, answered] {
    torch::jit::Stack again = asked;
    run_on_cpu(op, &again);
    for (size_t i = 0; i < answered.size(); i++) {
      if (answered[i].isTensor()) refill(answered[i].toTensor(), again[i].toTensor());
      if (!answered[i].isTensorList()) continue;
      const auto olds = answered[i].toTensorVector(), news = again[i].toTensorVector();
      for (size_t j = 0; j < olds.size(); j++) refill(olds[j], news[j]);
    }
  });
}

// --- operators with a kernel of their own --------------------------------------------------------------------------

caffe2::TypeMeta dtype_of(std::optional<c10::ScalarType> dtype) {
  return dtype ? c10::scalarTypeToTypeMeta(*dtype) : c10::get_default_dtype();
}

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::typeMetaToScalarType(dtype_of(dtype)), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::typeMetaToScalarType(dtype_of(dtype)));
}

// The host waits for a copy unless it asked not to, and the host's memory is pinned (or, on the way down, read at once).
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool down = from.device().type() == kSecond, up = to.device().type() == kSecond;
  streams::Operation operation("aten::copy_");
  if (down) operation.reads(from);
  if (up) operation.writes(to), graphs::writes(to);
  if (!from.numel()) return to;
  const Tensor source = down ? on_cpu(from) : from, target = up ? on_cpu(to) : to;
  if (down && up) {
    target.copy_(source);
  } else if (down) {
    if (non_blocking && PinnedAllocator::holds(to.storage().data()) && to.is_contiguous()) {
      streams::copied_down(source.to(to.scalar_type()).contiguous(), to);
    } else {
      note("copy to the host");
      target.copy_(source);
    }
  } else {
    if (non_blocking && PinnedAllocator::holds(from.storage().data()) && from.is_contiguous()) streams::copied_up(from);
    target.copy_(source);
    if (!non_blocking) note("copy from the host");
  }
  if (graphs::capturing())
    graphs::record([from = graphs::frozen(from, "a copy"), to = graphs::frozen(to, "a copy"), non_blocking] {
      copy_from(from, to, non_blocking);
    });
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

c10::Scalar item(const Tensor& tensor) {
  streams::Operation("aten::item").reads(tensor);
  note("item");
  return on_cpu(tensor).item();
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, Storage(self.storage()),
      self.key_set().remove(DispatchKey::Python).remove(DispatchKey::PythonTLSSnapshot), self.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(offset ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return view;
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto wanted = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != wanted) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(wanted);
    const size_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
    if (self.numel() && bytes > self.storage().nbytes()) grow(self.storage(), bytes);
  }
  if (format && *format != c10::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_to(Tensor& self, const Storage& storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(storage.device().type() == kSecond, "set_ of a storage of ", storage.device(), " into a tensor of second");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  const size_t bytes = self.numel() ? at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset) : 0;
  if (bytes > storage.nbytes()) grow(self.storage(), bytes);
  return self;
}

Tensor& set_storage(Tensor& self, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  return set_to(self, storage, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
                C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_whole_storage(Tensor& self, Storage storage) {
  return set_to(self, storage, 0, {static_cast<int64_t>(storage.nbytes() / self.itemsize())}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_to(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor& set_empty(Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

// Attention by its parts, as the CPU computes it where dropout is asked for, and else by the fused kernel of the CPU.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool causal, std::optional<double> scale, bool gqa) {
  return 0;
}

// torch gives a device that is not the CPU its fused dropout: here with the numbers and the rounding of the CPU's.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!input.numel() || (train && !*train) || p == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
  if (p == 1) return {at::zeros_like(input), at::zeros_like(input, input.options().dtype(c10::kBool))};
  Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  Tensor kept = noise.to(c10::kBool);
  return {input * noise.div_(1 - p), kept};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  return grad * mask.to(grad.scalar_type()).div_(scale == 0 ? 1 : 1 / scale);
}

// A parameter of the CPU may become one of this device and stay the same object, as CUDA's may.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& tensor) { return tensor.layout() == c10::kStrided && !tensor.is_meta(); };
  if (dense(self) && dense(from)) return true;
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

// A GPU counts integers, too; it looks for the range where none is given.
Tensor histc(const Tensor& self, int64_t bins, const c10::Scalar& lowest, const c10::Scalar& highest) {
  if (lowest.toDouble() == highest.toDouble()) note("histc");
  graphs::forbid("histc, which the second device does not record");
  streams::Operation("aten::histc").reads(self);
  const Tensor cpu = on_cpu(self);
  const auto found = at::histc(cpu.is_floating_point() ? cpu : cpu.to(c10::kDouble), bins, lowest, highest);
  return Views().on_device(found.to(self.scalar_type()));
}

// What torch asks of a device without libraries for them.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  streams::Operation operation("aten::convolution");
  for (const Tensor* tensor : {&input, &weight}) operation.reads(*tensor);
  if (bias) operation.reads(*bias);
  const auto cpu_bias = bias && bias->defined() ? std::optional<Tensor>(on_cpu(*bias)) : std::nullopt;
  const Tensor found = Views().on_device(at::convolution(
      on_cpu(input), on_cpu(weight), cpu_bias, stride, padding, dilation, transposed, output_padding, groups));
  graphs::forbid("a convolution, which the second device does not record");
  return found;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  streams::Operation operation("aten::convolution_backward");
  for (const Tensor* tensor : {&gradient, &input, &weight}) operation.reads(*tensor);
  const auto found = at::convolution_backward(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), IntArrayRef({gradient.size(1)}), stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  Views views;
  return {views.on_device(std::get<0>(found)), views.on_device(std::get<1>(found)), views.on_device(std::get<2>(found))};
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  streams::recorded_on(tensor.storage().data(), stream.id());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("histc", histc);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
}

// torch decomposes some operators where a device has no kernel of its own: here they are the CPU's kernels, too.
void take_kernels_of_cpu() {
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != std::optional<std::string_view>("aten")) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasKernelForDispatchKey(DispatchKey::CPU) || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
      continue;
    for (auto key : {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional})
      if (op->hasKernelForDispatchKey(key)) {
        library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
        break;
      }
  }
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator(c10::default_rng_seed_val));
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(kSecond, 0);
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::holds(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    grow(storage, bytes);
  }
};

}  // namespace

void bind_device(py::module_& m) {
  c10::SetAllocator(kSecond, &device_allocator);
  take_kernels_of_cpu();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("on_cpu", [](const Tensor& tensor) { return tensor.device().type() == kSecond ? on_cpu(tensor.detach()) : tensor; },
        "The CPU's view of a device tensor: the same memory.");
  m.def("listen", [](py::object called) {
    listening = false;
    delete on_wait;
    on_wait = called.is_none() ? nullptr : new py::object(std::move(called));
    listening = on_wait != nullptr;
  });
  m.def("note", [](const std::string& what) { note(what.c_str()); });
  m.def("synchronize", [] {
    streams::host_waits_for_all();
    tell("synchronize the device");
  });
  m.def("races", &streams::found, "What streams did to each other's memory where nothing could be raised.");
  m.def("clock", [] { return streams::recorded(streams::current()); }, "All that the current stream was given.");
  m.def("wait", [](const streams::Clock& clock) { streams::wait(streams::current(), clock); });
  m.def("use", [](const std::string& name, const std::vector<Tensor>& read, const std::vector<Tensor>& written) {
    static std::set<std::string> names;  // they are kept with the uses
    streams::Operation operation(names.insert(name).first->c_str());
    for (const Tensor& tensor : read) operation.reads(tensor);
    for (const Tensor& tensor : written) operation.writes(tensor);
  }, "An operation of the current stream that no kernel stands for.");
  m.def("default_generator", [] { return default_generator(); });
}
