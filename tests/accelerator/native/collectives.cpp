// Collectives: gloo's, on copies in host memory, in the order of a stream that belongs to the process group.

#include "collectives.h"

#include "backend.h"
#include "runtime.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

namespace simulated {

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A collective under way. `wait` makes the current stream wait for it, not the host. Its tensors are kept until
// then.
struct Collective final : c10d::Work {
  Collective(c10::Stream stream, Tensors tensors)
      : stream_(stream), number_(tasks_of(stream).last()), tensors_(std::move(tensors)) {}

  bool isCompleted() override {
    return tasks_of(stream_).is_done(number_);
  }

  bool isSuccess() const override {
    return true;
  }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

  void synchronize() override {
    auto& awaited = tasks_of(stream_);
    awaited.throw_error();
    current_tasks(stream_.device_index()).push([&awaited, number = number_] { awaited.wait(number); });
    tensors_.clear();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

 private:
  c10::Stream stream_;
  uint64_t number_;
  Tensors tensors_;
};

void require_device(const Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == kDevice,
      "No backend type associated with device type ", c10::DeviceTypeName(tensor.device().type(), true));
}

Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) {
    require_device(tensor);
    found.push_back(simulated::on_host(tensor));
  }
  return found;
}

Tensors clones(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(tensor.clone());
  return made;
}

// gloo has no mean: a sum that is divided.
template <class Options>
std::pair<Options, bool> without_mean(const Options& options) {
  auto changed = options;
  const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
  if (is_mean) changed.reduceOp = c10d::ReduceOp::SUM;
  return {changed, is_mean};
}

void copy_all(const Tensors& sources, const Tensors& targets) {
  for (size_t number = 0; number < targets.size(); ++number) targets[number].copy_(sources[number]);
}

struct Backend final : c10d::Backend {
  Backend(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "hccl";
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return begin(tensors, [gloo = gloo_, memory = on_host(tensors), options] {
      auto values = clones(memory);
      gloo->broadcast(values, options)->wait();
      copy_all(values, memory);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return begin(tensors, [gloo = gloo_, memory = on_host(tensors), options, size = getSize()] {
      const auto [changed, is_mean] = without_mean(options);
      auto values = clones(memory);
      gloo->allreduce(values, changed)->wait();
      if (is_mean) {
        for (auto& value : values) value.div_(size);
      }
      copy_all(values, memory);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    WorkPtr last;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      last = allreduce(one, options);
    }
    return last;
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(inputs.size() == 1, "one tensor for each rank");
    const auto targets = on_host(outputs[0]);
    return begin(both(outputs[0], inputs), [gloo = gloo_, source = on_host(inputs), targets, options] {
      auto values = clones(source);
      std::vector<Tensors> found{clones(targets)};
      gloo->allgather(found, values, options)->wait();
      copy_all(found[0], targets);
    });
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return begin({output, input}, [gloo = gloo_, memory = on_host(Tensors{output, input}), options] {
      auto values = clones(memory);
      gloo->_allgather_base(values[0], values[1], options)->wait();
      memory[0].copy_(values[0]);
    });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t number = 0; number < outputs.size(); ++number) {
      last = _allgather_base(outputs[number], inputs[number], options);
    }
    return last;
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const auto memory = on_host(Tensors{output, input});
    return begin({output, input}, [gloo = gloo_, memory, options, size = getSize()] {
      const auto [changed, is_mean] = without_mean(options);
      auto values = clones(memory);
      gloo->_reduce_scatter_base(values[0], values[1], changed)->wait();
      if (is_mean) values[0].div_(size);
      memory[0].copy_(values[0]);
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t number = 0; number < outputs.size(); ++number) {
      last = _reduce_scatter_base(outputs[number], inputs[number], options);
    }
    return last;
  }

  WorkPtr alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& received,
      std::vector<int64_t>& sent,
      const c10d::AllToAllOptions& options) override {
    return begin(
        {output, input},
        [gloo = gloo_, memory = on_host(Tensors{output, input}), received, sent, options]() mutable {
          auto values = clones(memory);
          gloo->alltoall_base(values[0], values[1], received, sent, options)->wait();
          memory[0].copy_(values[0]);
        });
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto tensor = at::empty({1}, at::TensorOptions().device(c10::Device(kDevice, current_device())));
    Tensors one{tensor.zero_()};
    auto work = allreduce(one, {});
    work->wait();
    ++counters.host_waits;
    wait_for_stream(current_stream(current_device()));
    return work;
  }

  void setSequenceNumberForGroup() override {}

  uint64_t getSequenceNumberForGroup() override {
    return 0;
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }

 private:
  static Tensors both(const Tensors& some, const Tensors& others) {
    auto all = some;
    all.insert(all.end(), others.begin(), others.end());
    return all;
  }

  // Runs a transfer on this group's stream, after all that is in the current stream by now.
  WorkPtr begin(const Tensors& tensors, std::function<void()> transfer) {
    ++counters.collectives;
    const int device = tensors.at(0).device().index();
    if (!stream_.has_value()) stream_ = new_stream(device);
    auto& before = current_tasks(device);
    tasks_of(*stream_).push([&before, number = before.last(), transfer = std::move(transfer)] {
      before.wait(number);
      const at::AutoDispatchBelowADInplaceOrView without_autograd;
      const at::NoGradGuard without_gradients;
      delay();
      transfer();
    });
    return c10::make_intrusive<Collective>(*stream_, tensors);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::optional<c10::Stream> stream_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<Backend>(rank, size, std::move(gloo));
}

}  // namespace simulated
