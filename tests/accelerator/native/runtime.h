// What the simulated accelerator consists of: settings, counters, streams and memory.
//
// Device memory is memory of the host. A stream is a thread that runs tasks in order. Kernels run on the calling
// thread once the current stream is idle; copies, fills and collectives run on the stream, later.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;

// Bytes that are written over memory, so that it is noticed who reads it too early or too late.
constexpr int kTaken = 0xCD;  // -4.3e8 in float32
constexpr int kFreed = 0xFF;  // not a number in every floating-point dtype

struct Settings {
  std::atomic<int> devices{1};
  std::atomic<int> delay_us{0};  // of each copy, fill and collective on a stream
  std::atomic<int> upload_delay_us{0};  // more, of each copy to a device that the host does not wait for
  std::atomic<int64_t> memory_bytes{int64_t{1} << 30};  // of all devices of this process together
};
extern Settings settings;

struct Counters {
  std::atomic<int64_t> host_waits{0};  // times that the host waited for a device
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> collectives{0};
  std::atomic<int64_t> async_copies{0};  // copies between memories that the host did not wait for
  std::atomic<int64_t> pageable_to_device{0};
  std::atomic<int64_t> pageable_to_host{0};
  std::atomic<int64_t> pinned_to_device{0};
  std::atomic<int64_t> pinned_to_host{0};
  std::atomic<int64_t> pinned_bytes{0};  // with what rounding up to powers of two adds
  std::atomic<int64_t> pinned_peak{0};
  std::atomic<int64_t> device_bytes{0};
  std::atomic<int64_t> device_peak{0};
};
extern Counters counters;

// Tasks in order, on a thread of their own. Streams are never destroyed.
class Task_queue {
 public:
  Task_queue();

  // Adds a task. Returns its number, which `wait` and `is_done` take.
  uint64_t push(std::function<void()> task);

  // The number of the last task that was added.
  uint64_t last() const;

  bool is_done(uint64_t number) const;

  // Waits until the task with this number is done, whether it failed or not.
  void wait(uint64_t number) const;

  // Throws the first error of a task, as CUDA does: late, and from then on always.
  void throw_error() const;

  // While it is paused, no task begins. One that has begun goes on to its end.
  void set_paused(bool is_paused);

 private:
  void run();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  uint64_t added_ = 0;
  uint64_t done_ = 0;
  bool is_paused_ = false;
  std::string error_;
};

// The current device and streams of the calling thread.
int current_device();
void set_current_device(int device);
c10::Stream current_stream(int device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(int device);

// The tasks of a stream. Throws if this process was forked from one that had used the device.
Task_queue& tasks_of(const c10::Stream& stream);
Task_queue& current_tasks(int device);

// Makes the host wait, without counting it.
void wait_for_stream(const c10::Stream& stream);
void wait_for_device(int device);

// Sleeps as long as the settings say that a transfer takes.
void delay(bool is_late_upload = false);

// Whether this process has used a device, or was forked from one that had, which it cannot survive.
bool is_initialized();
bool is_in_bad_fork();

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

// Memory that is used on another stream than its own is not taken back before that stream has come so far.
void record_use(const c10::DataPtr& memory, const c10::Stream& stream);

}  // namespace simulated
