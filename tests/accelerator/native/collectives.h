#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

// A backend for tensors of the device that goes through another, which takes the CPU's.
c10::intrusive_ptr<c10d::Backend> make_backend(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo);

}  // namespace simulated
