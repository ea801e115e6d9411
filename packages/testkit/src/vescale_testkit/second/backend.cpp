// A c10d backend whose collectives are written in Python: torch's own ProcessGroup and dispatcher stand before it.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "graphs.hpp"

using at::Tensor;
using c10d::Backend;
using c10d::Work;

void bind_device(py::module_& m);

namespace {

// A Python object that may be let go of from any thread.
struct Held {
  py::object object;
  explicit Held(py::object given) : object(std::move(given)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (!Py_IsInitialized()) {
      object.release();
      return;
    }
    py::gil_scoped_acquire gil;
    object = py::object();
  }
};

struct SecondWork final : Work {
  Held held;
  explicit SecondWork(py::object work) : held(std::move(work)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    py::gil_scoped_acquire gil;
    held.object.attr("wait")(timeout == kNoTimeout ? py::object(py::none()) : py::cast(timeout.count() / 1000.0));
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  void blockCurrentStream() override {
    wait(kNoTimeout);
  }
  bool isCompleted() override {
    py::gil_scoped_acquire gil;
    return held.object.attr("is_completed")().cast<bool>();
  }
  bool isSuccess() const override {
    py::gil_scoped_acquire gil;
    return held.object.attr("is_completed")().cast<bool>();
  }
  uint64_t getSequencenumber() const override {
    py::gil_scoped_acquire gil;
    return held.object.attr("number").cast<uint64_t>();
  }
};

// In a graph, where nobody waits.
struct CapturedWork final : Work {
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
  void synchronize() override {}
  void blockCurrentStream() override {}
  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
};

template <typename T>
T frozen(const T& value) requires std::is_arithmetic_v<T> {
  return value;
}
std::string frozen(const std::string& value) {
  return value;
}
Tensor frozen(const Tensor& tensor) {
  graphs::writes(tensor);
  return graphs::frozen(tensor, "a collective");
}
template <typename T>
std::vector<T> frozen(const std::vector<T>& all) {
  std::vector<T> found;
  for (const T& one : all) found.push_back(frozen(one));
  return found;
}

class SecondBackend final : public Backend {
 public:
  SecondBackend(int rank, int size, py::object group) : Backend(rank, size), held_(std::move(group)) {}

  const std::string getBackendName() const override {
    return "second";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    call("set_timeout", timeout.count() / 1000.0);
  }
  void startCoalescing() override {
    call("start_coalescing");
  }
  c10::intrusive_ptr<Work> endCoalescing() override {
    return start("end_coalescing");
  }
  c10::intrusive_ptr<Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return start("broadcast", tensors, options.rootRank, options.asyncOp);
  }
  c10::intrusive_ptr<Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return start("all_reduce", tensors, name_of(options.reduceOp), options.asyncOp);
  }
  c10::intrusive_ptr<Work> reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    return start("reduce", tensors, name_of(options.reduceOp), options.rootRank, options.asyncOp);
  }
  c10::intrusive_ptr<Work> allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                                     const c10d::AllgatherOptions& options) override {
    return start("all_gather_list", outputs, inputs, options.asyncOp);
  }
  c10::intrusive_ptr<Work> gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                                  const c10d::GatherOptions& options) override {
    return start("gather", outputs, inputs, options.rootRank, options.asyncOp);
  }
  c10::intrusive_ptr<Work> scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                                   const c10d::ScatterOptions& options) override {
    return start("scatter", outputs, inputs, options.rootRank, options.asyncOp);
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    return start("all_gather", output, input, options.asyncOp);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    return start("reduce_scatter", output, input, name_of(options.reduceOp), options.asyncOp);
  }
  c10::intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& options) override {
    return start("all_to_all", output, input, output_splits, input_splits, options.asyncOp);
  }
  c10::intrusive_ptr<Work> send(std::vector<Tensor>& tensors, int peer, int /*tag: NCCL has none*/) override {
    return start("send", tensors, peer);
  }
  c10::intrusive_ptr<Work> recv(std::vector<Tensor>& tensors, int peer, int /*tag*/) override {
    return start("recv", tensors, peer);
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    return start("barrier", options.asyncOp);
  }
  void abort() override {
    call("abort");
  }
  void shutdown() override {
    call("shutdown");
  }

 private:
  static std::string name_of(const c10d::ReduceOp& op) {
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        return "sum";
      case c10d::ReduceOp::AVG:
        return "avg";
      case c10d::ReduceOp::PRODUCT:
        return "product";
      case c10d::ReduceOp::MIN:
        return "min";
      case c10d::ReduceOp::MAX:
        return "max";
      default:
        TORCH_CHECK(false, "Cannot use ReduceOp of kind ", int(op.op_), " with NCCL");
    }
  }
  // Captured collectives are begun, and waited for, whenever the graph is run.
  template <typename... Arguments>
  bool recorded(const char* name, const Arguments&... arguments) {
    if (!graphs::capturing()) return false;
    auto given = std::make_shared<Held>(py::make_tuple(frozen(arguments)...));
    graphs::record([this, name, given] {
      py::gil_scoped_acquire gil;
      const py::object work = held_.object.attr(name)(*py::tuple(given->object));
      if (!work.is_none()) work.attr("wait")();
    });
    return true;
  }
  template <typename... Arguments>
  void call(const char* name, Arguments&&... arguments) {
    py::gil_scoped_acquire gil;
    if (recorded(name, arguments...)) return;
    held_.object.attr(name)(std::forward<Arguments>(arguments)...);
  }
  template <typename... Arguments>
  c10::intrusive_ptr<Work> start(const char* name, Arguments&&... arguments) {
    py::gil_scoped_acquire gil;
    if (recorded(name, arguments...)) return c10::make_intrusive<CapturedWork>();
    py::object work = held_.object.attr(name)(std::forward<Arguments>(arguments)...);
    if (work.is_none()) return nullptr;
    return c10::make_intrusive<SecondWork>(std::move(work));
  }
  Held held_;
};

}  // namespace

PYBIND11_MODULE(vescale_second, m) {
  py::module_::import("torch.distributed");  // registers Backend
  bind_device(m);
  m.def("backend", [](int rank, int size, py::object group) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<SecondBackend>(rank, size, std::move(group));
  });
}
