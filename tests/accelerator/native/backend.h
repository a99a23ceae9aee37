#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace simulated {

const at::Generator& default_generator(int device);

// The memory of a device's tensor as a tensor of the CPU. It does not keep the memory alive.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace simulated
