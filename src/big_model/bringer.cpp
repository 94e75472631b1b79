#include <big_model/bringer.hpp>
#include <intercept/quiet.hpp>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <optional>

namespace accelerate::big_model {

class Bringer::Job {
 public:
  std::function<void()> fill;
  enum class State { waiting, running, done } state = State::waiting;
  std::exception_ptr error;
  std::optional<c10::Event> ready;   // the memory to be filled is no longer used
  std::optional<c10::Event> filled;  // the copies are done
};

struct Bringer::Streams {
  explicit Streams(at::Device device)
      : guard(device.type()), copies(guard.getStreamFromGlobalPool(device)) {}
  c10::impl::VirtualGuardImpl guard;
  c10::Stream copies;
};

Bringer::Bringer(at::Device device) : device_(device) {
  if (!device.is_cpu() && !device.is_meta()) streams_ = std::make_unique<Streams>(device);
  thread_ = std::thread([this] { work(); });
}

Bringer::~Bringer() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    waiting_.clear();
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<Bringer::Job> Bringer::start(std::function<void()> fill) {
  auto job = std::make_shared<Job>();
  job->fill = std::move(fill);
  if (streams_) {
    // The memory may have been another unit's, whose last kernel is still under way.
    job->ready.emplace(device_.type());
    job->ready->record(streams_->guard.getStream(device_));
  }
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(job);
  }
  changed_.notify_all();
  return job;
}

void Bringer::run(Job& job) {
  try {
    if (streams_) {
      struct Restore {
        const c10::impl::VirtualGuardImpl& guard;
        c10::Stream before;
        ~Restore() { guard.exchangeStream(before); }
      } restore{streams_->guard, streams_->guard.exchangeStream(streams_->copies)};
      job.ready->block(streams_->copies);
      job.fill();
      job.filled.emplace(device_.type());
      job.filled->record(streams_->copies);
    } else {
      job.fill();
    }
  } catch (...) {
    job.error = std::current_exception();
  }
}

void Bringer::finish(Job& job) {
  std::unique_lock lock(mutex_);
  if (job.state == Job::State::waiting) {
    job.state = Job::State::running;
    lock.unlock();
    run(job);
    lock.lock();
    job.state = Job::State::done;
  } else {
    changed_.wait(lock, [&] { return job.state == Job::State::done; });
  }
  job.fill = nullptr;
  if (job.error) std::rethrow_exception(job.error);
  if (job.filled) job.filled->block(streams_->guard.getStream(device_));
}

void Bringer::work() {
  const intercept::Quiet quiet;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (closed_) return;
    const std::shared_ptr<Job> job = waiting_.front();
    waiting_.pop_front();
    if (job->state != Job::State::waiting) continue;
    job->state = Job::State::running;
    lock.unlock();
    run(*job);
    lock.lock();
    job->state = Job::State::done;
    changed_.notify_all();
  }
}

}  // namespace accelerate::big_model
