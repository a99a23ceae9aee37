// Streams as threads.

#include "runtime.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <map>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

Settings settings;
Counters counters;

Task_queue::Task_queue() {
  std::thread([this] { run(); }).detach();
}

uint64_t Task_queue::push(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
  return ++added_;
}

uint64_t Task_queue::last() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return added_;
}

bool Task_queue::is_done(uint64_t number) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= number;
}

void Task_queue::wait(uint64_t number) const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

void Task_queue::throw_error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(error_.empty(), "NPU error on a stream: ", error_);
}

void Task_queue::set_paused(bool is_paused) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_paused_ = is_paused;
  changed_.notify_all();
}

void Task_queue::run() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !tasks_.empty() && !is_paused_; });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    std::string error;
    try {
      task();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    task = nullptr;  // what it holds is let go before the task counts as done
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = error;
    ++done_;
    changed_.notify_all();
  }
}

namespace {

thread_local int device_of_thread = 0;
thread_local std::array<c10::StreamId, kMostDevices> streams_of_thread{};

std::atomic<bool> has_begun{false};
std::atomic<bool> is_forked{false};
std::atomic<c10::StreamId> next_stream{1};

using Key = std::pair<int, c10::StreamId>;
std::mutex& registry_mutex = *new std::mutex;  // not destroyed: threads may outlive static objects
std::map<Key, Task_queue*>& registry = *new std::map<Key, Task_queue*>;

void after_fork() {
  is_forked = has_begun.load();
}

const int registered = pthread_atfork(nullptr, nullptr, after_fork);

c10::Stream stream_of(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, {kDevice, static_cast<c10::DeviceIndex>(device)}, id);
}

}  // namespace

bool is_initialized() {
  return has_begun && !is_forked;
}

bool is_in_bad_fork() {
  return is_forked;
}

int current_device() {
  return device_of_thread;
}

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < settings.devices, "NPU error: invalid device ordinal ", device);
  device_of_thread = device;
}

c10::Stream current_stream(int device) {
  return stream_of(device, streams_of_thread.at(device));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const int device = stream.device_index();
  return stream_of(device, std::exchange(streams_of_thread.at(device), stream.id()));
}

c10::Stream new_stream(int device) {
  return stream_of(device, next_stream++);
}

Task_queue& tasks_of(const c10::Stream& stream) {
  TORCH_CHECK(!is_forked, "Cannot re-initialize NPU in forked subprocess");
  has_begun = true;
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto& tasks = registry[{stream.device_index(), stream.id()}];
  if (tasks == nullptr) tasks = new Task_queue;
  return *tasks;
}

Task_queue& current_tasks(int device) {
  return tasks_of(current_stream(device));
}

void wait_for_stream(const c10::Stream& stream) {
  auto& tasks = tasks_of(stream);
  tasks.wait(tasks.last());
  tasks.throw_error();
}

void wait_for_device(int device) {
  std::vector<Task_queue*> all;
  {
    std::lock_guard<std::mutex> lock(registry_mutex);
    for (const auto& [key, tasks] : registry) {
      if (key.first == device) all.push_back(tasks);
    }
  }
  for (auto* tasks : all) {
    tasks->wait(tasks->last());
    tasks->throw_error();
  }
}

void delay(bool is_late_upload) {
  const int microseconds = settings.delay_us + (is_late_upload ? settings.upload_delay_us.load() : 0);
  if (microseconds > 0) usleep(microseconds);
}

}  // namespace simulated
