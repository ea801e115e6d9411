// Graphs of the device, as CUDA's are: what a step gives to the device is kept with the addresses that it had, and given
// again as often as one likes. A capture runs no kernel: here they run, for the sizes, and what they wrote to memory from
// before it is made undone; what was made within it holds poison until the graph is run.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <string>

namespace graphs {

bool capturing();

// Refuses what a stream that is captured may not do.
void forbid(const char* what);

// The same memory, whatever becomes of the tensor's storage; `by` whom it is used.
at::Tensor frozen(const at::Tensor& tensor, const std::string& by);

// Is run whenever the graph is.
void record(std::function<void()> again);

// Before memory is written.
void writes(const at::Tensor& tensor);

// Memory that was made within a capture stays the graph's, which is asked when others give it back.
void made(const c10::Storage& storage);
void made(void* memory, size_t bytes);
bool keeps(void* memory);

}  // namespace graphs
