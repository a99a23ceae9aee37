// Operations: copies and fills on streams, views, and everything else as the CPU's kernels.

#include "backend.h"
#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <unordered_set>

namespace simulated {

using at::IntArrayRef;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
template <class T>
using Optional = std::optional<T>;

at::Tensor on_host(const at::Tensor& tensor) {
  void* memory = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

namespace {

// Whether this thread is in a kernel of the CPU, whose copies are part of it.
thread_local bool is_in_kernel = false;

struct In_kernel {
  const bool before = std::exchange(is_in_kernel, true);
  ~In_kernel() {
    is_in_kernel = before;
  }
};

Tensor empty(
    IntArrayRef size,
    Optional<c10::ScalarType> dtype,
    Optional<c10::Layout>,
    Optional<c10::Device> device,
    Optional<bool>,
    Optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    Optional<c10::ScalarType> dtype,
    Optional<c10::Layout>,
    Optional<c10::Device> device,
    Optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, Optional<SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, size, stride, offset);
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& tensor, SymIntArrayRef size, Optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

Tensor& set_storage(Tensor& tensor, at::Storage source) {
  return at::native::set_(tensor, source);
}

Tensor& set_strided(Tensor& tensor, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(tensor, source, offset, size, stride);
}

// A tensor of the host with its own hold on the memory, for a task that runs later.
Tensor kept(const Tensor& tensor) {
  void* memory = const_cast<void*>(tensor.const_data_ptr());
  const auto hold = [storage = tensor.storage()](void*) {};
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), hold, tensor.options());
}

// Copies with the CPU's kernel, on any thread.
void copy_now(const Tensor& source, const Tensor& target) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const at::NoGradGuard without_gradients;
  target.copy_(source);
}

// Copies between memories, or within a device. What the device holds is not kept alive: whoever frees it while the
// copy is under way must have told its stream.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool is_up = source.is_cpu();
  const bool is_down = target.is_cpu();
  const int device = is_up ? target.device().index() : source.device().index();
  const Tensor host_target = is_down ? kept(target) : on_host(target);
  Tensor host_source = is_up ? kept(source) : on_host(source);
  if (is_in_kernel) {
    copy_now(host_source, host_target);
    return target;
  }
  bool waits = false;
  if (is_up || is_down) {
    // CUDA casts on the host what the host waits for, in pageable memory of its own.
    const bool casts_on_host = !non_blocking && source.scalar_type() != target.scalar_type();
    const bool pinned = !casts_on_host && is_pinned((is_up ? source : target).const_data_ptr());
    ++(is_up ? (pinned ? counters.pinned_to_device : counters.pageable_to_device)
             : (pinned ? counters.pinned_to_host : counters.pageable_to_host));
    // CUDA takes pageable memory into memory of its own before it returns, and brings it down synchronously.
    waits = !non_blocking || (is_down && !pinned);
    if (is_up && !pinned && !waits) host_source = host_source.clone();
  }
  auto& tasks = current_tasks(device);
  const bool is_late = is_up && !waits;
  const auto number = tasks.push([host_source, host_target, is_late] {
    delay(is_late);
    copy_now(host_source, host_target);
  });
  if (waits) {
    ++counters.host_waits;
    tasks.wait(number);
    tasks.throw_error();
  } else if (is_up || is_down) {
    ++counters.async_copies;
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

Tensor& fill(Tensor& tensor, const at::Scalar& value) {
  ++counters.kernels;
  current_tasks(tensor.device().index()).push([memory = on_host(tensor), value]() mutable {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    const at::NoGradGuard without_gradients;
    delay();
    memory.fill_(value);
  });
  return tensor;
}

Tensor& zero(Tensor& tensor) {
  return fill(tensor, 0);
}

at::Scalar local_scalar(const Tensor& tensor) {
  if (!is_in_kernel) ++counters.host_waits;
  wait_for_stream(current_stream(tensor.device().index()));
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  record_use(tensor.storage().data_ptr(), stream);
}

void note_device(const Tensor& tensor, std::set<int>& devices) {
  if (tensor.defined() && tensor.device().type() == kDevice) devices.insert(tensor.device().index());
}

std::set<int> devices_of(const torch::jit::Stack& arguments) {
  std::set<int> devices;
  for (const auto& value : arguments) {
    if (value.isTensor()) note_device(value.toTensor(), devices);
    if (value.isTensorList()) {
      for (const auto& tensor : value.toTensorVector()) note_device(tensor, devices);
    }
    if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor.has_value()) note_device(*tensor, devices);
      }
    }
  }
  return devices;
}

bool is_mask(const std::optional<Tensor>& index) {
  if (!index.has_value() || !index->defined()) return false;
  return index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
}

// Whether the host must wait for values before it knows the result's shape, or has the result.
bool needs_values(const std::string& name, const torch::jit::Stack& arguments) {
  static const auto& names = *new std::unordered_set<std::string>{
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::allclose",
  };
  if (names.count(name) > 0) return true;
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  for (const auto& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    for (const auto& index : value.toOptionalTensorVector()) {
      if (is_mask(index)) return true;
    }
  }
  return false;
}

// A kernel is in the order of the current stream; other streams go on meanwhile.
void run_kernel(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto count = operation.schema().arguments().size();
  const torch::jit::Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  ++counters.kernels;
  if (needs_values(operation.schema().name(), arguments)) ++counters.host_waits;
  for (const int device : devices_of(arguments)) wait_for_stream(current_stream(device));
  const In_kernel in_kernel;
  at::native::cpu_fallback(operation, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("fill_.Scalar", fill);
  library.impl("zero_", zero);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  // One of the CPU's and CUDA's kernels, which other devices have composed of several.
  library.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

}  // namespace simulated
