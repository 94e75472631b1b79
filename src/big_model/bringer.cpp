#include <big_model/bringer.hpp>
#include <intercept/internal_ops.hpp>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <exception>
#include <optional>

namespace accelerate::big_model {

class Bringer::Job {
 public:
  std::size_t pieces = 0;
  std::function<void(std::size_t)> fill;
  std::atomic<std::size_t> next{0};
  // The rest is guarded by the mutex, but for events, which the one piece of a job with streams has
  // to itself.
  std::size_t done = 0;
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

std::shared_ptr<Bringer::Job> Bringer::start(std::size_t pieces,
                                             std::function<void(std::size_t)> fill) {
  auto job = std::make_shared<Job>();
  job->pieces = pieces;
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

void Bringer::run(Job& job, std::size_t piece) {
  if (!streams_) return job.fill(piece);
  struct Restore {
    const c10::impl::VirtualGuardImpl& guard;
    c10::Stream before;
    ~Restore() { guard.exchangeStream(before); }
  } restore{streams_->guard, streams_->guard.exchangeStream(streams_->copies)};
  job.ready->block(streams_->copies);
  job.fill(piece);
  job.filled.emplace(device_.type());
  job.filled->record(streams_->copies);
}

// All pieces that nobody else takes.
void Bringer::run_all(Job& job) {
  for (std::size_t piece; (piece = job.next.fetch_add(1)) < job.pieces;) {
    std::exception_ptr error;
    try {
      run(job, piece);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    ++job.done;
    if (error) {
      // What nobody has taken need not be filled any more.
      const std::size_t taken = job.next.exchange(job.pieces);
      if (taken < job.pieces) job.done += job.pieces - taken;
      if (!job.error) job.error = error;
    }
    if (job.done == job.pieces) changed_.notify_all();
  }
}

void Bringer::finish(Job& job) {
  run_all(job);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return job.done == job.pieces; });
  job.fill = nullptr;  // lets go of the buffer, which the thread may hold a while longer
  if (job.error) std::rethrow_exception(job.error);
  if (job.filled) job.filled->block(streams_->guard.getStream(device_));
}

void Bringer::work() {
  const intercept::InternalOpsGuard internal;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (closed_) return;
    const std::shared_ptr<Job> job = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    run_all(*job);
    lock.lock();
  }
}

}  // namespace accelerate::big_model
