#include "comm/mpi_progress.hpp"

#include "comm/mpi_backend.hpp"
#include "comm/world_impl.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <torch/csrc/distributed/c10d/exception.h>

#include <sys/prctl.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

namespace accelerate::comm {

using std::chrono::microseconds;

namespace {

/// What nobody waits for any more, such as a batch scattered ahead of use, has so long to finish
/// when the program ends: the other ranks take part in it and end with this one.
constexpr std::chrono::seconds kGrace{1};

std::atomic<bool> given_up{false};
std::atomic<bool> started_here{false};

/// Operations whose memory MPI may still touch. Never destroyed.
std::vector<MpiOperation>& graveyard() {
  static auto* const operations = new std::vector<MpiOperation>;
  return *operations;
}

std::mutex current_mutex;
std::weak_ptr<MpiProgress>& current() {
  static auto* const progress = new std::weak_ptr<MpiProgress>;
  return *progress;
}

/// How long to pause before asking again: at once at first, for an answer is often near; then
/// longer and longer, up to a limit at which asking costs next to nothing.
class Pauses {
 public:
  void reset() { asked_ = 0; }
  microseconds next() {
    ++asked_;
    if (asked_ <= kEager) return microseconds(0);
    return std::min(kLongest, microseconds(10 + (asked_ - kEager)));
  }

 private:
  static constexpr int kEager = 50;
  static constexpr microseconds kLongest{500};
  int asked_ = 0;
};

}  // namespace

void ensure_mpi() {
  static std::once_flag once;
  std::call_once(once, [] {
    int up = 0;
    int provided = 0;
    MPI_Initialized(&up);
    if (up != 0) {
      MPI_Query_thread(&provided);
    } else {
      check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided),
                "MPI_Init_thread");
      started_here = true;
      end_run_at_exit();
    }
    if (provided < MPI_THREAD_MULTIPLE) {
      throw ConfigError(
          "MPI does not allow calls from several threads (MPI_THREAD_MULTIPLE), which the mpi "
          "backend needs. If the program "
          "starts MPI itself, call MPI_Init_thread with MPI_THREAD_MULTIPLE; else use an MPI that "
          "was built with it, or the gloo "
          "backend with MASTER_ADDR and MASTER_PORT set.");
    }
  });
}

void give_mpi_up() noexcept { given_up = true; }

void finish_mpi(bool failed) noexcept {
  if (!started_here || !mpi_is_up()) return;
  if (failed || given_up) return;
  // Whatever still holds a group, such as an object of static duration, must not keep the thread
  // inside MPI.
  MpiProgress::end();
  if (!given_up) MPI_Finalize();
}

bool mpi_is_up() {
  int up = 0;
  int down = 0;
  MPI_Initialized(&up);
  MPI_Finalized(&down);
  return up != 0 && down == 0;
}

MpiWork::MpiWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
    : Work(rank, type),
      outputs_(std::move(outputs)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
}

void MpiWork::succeed(int source) {
  source_ = source;
  future_->markCompleted(c10::IValue(outputs_));
  finish();
}

void MpiWork::fail(const std::exception_ptr& error) {
  future_->setError(error);
  finish(error);
}

std::shared_ptr<MpiProgress> MpiProgress::get() {
  const std::lock_guard lock(current_mutex);
  auto progress = current().lock();
  if (!progress) {
    ensure_mpi();
    progress = std::shared_ptr<MpiProgress>(new MpiProgress);
    current() = progress;
  }
  return progress;
}

MpiProgress::MpiProgress() : thread_([this] { run(); }) {}

MpiProgress::~MpiProgress() { stop(); }

void MpiProgress::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void MpiProgress::end() {
  std::shared_ptr<MpiProgress> progress;
  {
    const std::lock_guard lock(current_mutex);
    progress = current().lock();
  }
  if (progress) progress->stop();
}

void MpiProgress::submit(MpiOperation operation) {
  if (operation.channel->broken) {
    operation.work->fail(std::make_exception_ptr(std::runtime_error(
        "an earlier operation of this group was given up, and MPI cannot go on after that")));
    return;
  }
  ++operation.channel->under_way;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(operation));
  }
  changed_.notify_one();
}

void MpiProgress::abandon(const std::shared_ptr<MpiChannel>& channel) {
  channel->broken = true;
  give_mpi_up();
  {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
  }
  changed_.notify_one();
}

void MpiProgress::give_up(MpiOperation& operation, const std::exception_ptr& error) {
  operation.channel->broken = true;
  give_mpi_up();
  operation.work->fail(error);
  graveyard().push_back(std::move(operation));
}

/// True when the operation is over.
bool MpiProgress::advance(MpiOperation& operation) {
  try {
    if (!operation.started) {
      operation.started = true;
      operation.requests = operation.start();
    }
    int done = 0;
    std::vector<MPI_Status> statuses(operation.requests.size());
    check_mpi(MPI_Testall(static_cast<int>(operation.requests.size()), operation.requests.data(),
                          &done, statuses.data()),
              "MPI_Testall");
    if (done == 0) {
      if (operation.channel->broken) {
        give_up(operation,
                std::make_exception_ptr(std::runtime_error("the operation was aborted")));
        return true;
      }
      if (Clock::now() > operation.deadline) {
        give_up(operation, std::make_exception_ptr(c10d::TimeoutError(
                               {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                               "MPI did not finish in time")));
        return true;
      }
      return false;
    }
    if (operation.finish) operation.finish();
    --operation.channel->under_way;
    operation.work->succeed(statuses.empty() ? -1 : statuses.front().MPI_SOURCE);
  } catch (...) {
    give_up(operation, std::current_exception());
  }
  return true;
}

void MpiProgress::run() {
  ::prctl(PR_SET_NAME, "accelerate-mpi");
  // The default lets every pause be 50 microseconds longer than asked for.
  ::prctl(PR_SET_TIMERSLACK, 1000);
  std::vector<MpiOperation> active;
  Pauses pauses;
  std::optional<Clock::time_point> give_up_at;
  std::unique_lock lock(mutex_);
  while (true) {
    if (!queue_.empty()) pauses.reset();
    while (!queue_.empty()) {
      active.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
    if (active.empty()) {
      if (stop_) return;
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      continue;
    }
    const bool stopping = stop_;
    abandoned_ = false;
    lock.unlock();
    const std::size_t before = active.size();
    std::vector<MpiOperation> left;
    for (auto& operation : active) {
      if (!advance(operation)) left.push_back(std::move(operation));
    }
    active = std::move(left);
    if (stopping && !give_up_at) give_up_at = Clock::now() + kGrace;
    if (stopping && Clock::now() > *give_up_at && !active.empty()) {
      log::warning(
          text::concat(
              "The program ends while ", active.size(),
              " operation(s) over MPI that nobody waited for are still under way. They are "
              "given up, and MPI is not finalized, which mpiexec may report."),
          log::Ranks::all);
      for (auto& operation : active) {
        give_up(operation, std::make_exception_ptr(std::runtime_error("the group was shut down")));
      }
      active.clear();
    }
    if (active.size() != before) pauses.reset();
    lock.lock();
    if (active.empty() || !queue_.empty() || abandoned_) continue;
    const auto pause = pauses.next();
    if (pause.count() == 0) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    } else {
      changed_.wait_for(lock, pause);
    }
  }
}

}  // namespace accelerate::comm
