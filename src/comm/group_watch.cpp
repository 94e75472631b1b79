#include "comm/group_watch.hpp"

#include "comm/user_call.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>

namespace accelerate::comm {

using std::chrono::milliseconds;
using text::concat;
using Clock = std::chrono::steady_clock;

namespace {

/// A rank that leaves has finished its own part of every operation before it says so. What it sent
/// is in the system's buffers then, and arrives within this time.
constexpr std::chrono::seconds kOnTheWay{3};

}  // namespace

GroupWatch::GroupWatch(std::string name, int rank, std::vector<int> global_ranks,
                       milliseconds timeout, std::shared_ptr<Liveness> liveness, bool is_world,
                       bool debug)
    : name_(std::move(name)),
      rank_(rank),
      global_ranks_(std::move(global_ranks)),
      timeout_(timeout),
      liveness_(std::move(liveness)),
      is_world_(is_world),
      debug_(debug) {}

OperationName GroupWatch::operation(const char* kind) const {
  const char* call = debug_ ? UserCall::name() : nullptr;
  return {kind, name_, rank_, static_cast<int>(global_ranks_.size()), call ? call : ""};
}

void GroupWatch::note_operation() {
  if (is_world_) liveness_->count_operation();
}

void GroupWatch::count(const char* kind, std::int64_t bytes) {
  note_operation();
  for (GroupWatch* watch = this; watch != nullptr; watch = watch->parent_.get()) {
    const std::lock_guard lock(watch->mutex_);
    auto& count = watch->traffic_[kind];
    ++count.calls;
    count.bytes += bytes;
  }
}

Traffic GroupWatch::traffic() const {
  const std::lock_guard lock(mutex_);
  return Traffic{traffic_};
}

void GroupWatch::reset_traffic() {
  const std::lock_guard lock(mutex_);
  traffic_.clear();
}

void GroupWatch::abort_on_loss(c10d::Backend* backend) {
  const std::lock_guard lock(abort_mutex_);
  abortable_.push_back(backend);
}

void GroupWatch::forget(c10d::Backend* backend) {
  const std::lock_guard lock(abort_mutex_);
  std::erase(abortable_, backend);
}

std::exception_ptr GroupWatch::lost_error(const Loss& loss, const OperationName& name,
                                          const std::exception_ptr& cause) const {
  const int world_rank = global_ranks_[static_cast<std::size_t>(rank_)];
  for (const auto& failed : liveness_->failed_alone(global_ranks_)) {
    // Who went after it went because of it.
    if (!loss.own && failed.rank != loss.rank) return failed_alone_error(failed.rank, name);
  }
  const std::string message =
      loss.own ? concat(name.text(), " failed because this rank left the run: ", loss.reason, ".")
      : loss.rank == world_rank
          ? concat(name.text(), " failed because the other ranks gave this one up: ", loss.reason,
                   ". Was the process stopped, or its machine asleep? The time allowed is "
                   "ACCELERATE_HEARTBEAT_TIMEOUT, in seconds.")
          : concat(name.text(), " failed because rank ", loss.rank, " was lost: ", loss.reason,
                   ". The reason is in the output of rank ", loss.rank, ".");
  try {
    if (cause) {
      try {
        std::rethrow_exception(cause);
      } catch (...) {
        std::throw_with_nested(PeerLostError(message, name.operation, rank_, loss.rank));
      }
    }
    throw PeerLostError(message, name.operation, rank_, loss.rank);
  } catch (...) {
    return std::current_exception();
  }
}

void GroupWatch::check_alive(const char* kind) const {
  // A rank that left may have done its part before: that is no reason to refuse. Nor is one that
  // was lost just now.
  if (const auto loss = liveness_->final_loss())
    std::rethrow_exception(lost_error(*loss, operation(kind), nullptr));
  if (is_broken()) std::rethrow_exception(failed_alone_error(broken_by_, operation(kind)));
}

void GroupWatch::check_present(const char* kind) const {
  check_alive(kind);
  for (const auto& gone : liveness_->departures()) {
    const bool member =
        std::find(global_ranks_.begin(), global_ranks_.end(), gone.rank) != global_ranks_.end();
    if (member && Clock::now() - gone.when > milliseconds(1000))
      std::rethrow_exception(left_error(gone.rank, operation(kind)));
  }
}

void GroupWatch::check_cause(const char* kind, milliseconds patience) const {
  if (const auto loss = liveness_->wait_for_loss(patience))
    std::rethrow_exception(lost_error(*loss, operation(kind), nullptr));
}

void GroupWatch::say_failed_pass() {
  // Otherwise the others know the cause, and this is what came of it.
  if (!is_broken() && !knows_loss()) liveness_->say_failed_pass();
}

void GroupWatch::wait_until_all_failed() const {
  const auto begin = Clock::now();
  while (!liveness_->all_failed(global_ranks_, milliseconds(100))) {
    check_present("backward");
    if (Clock::now() - begin < timeout_) continue;
    throw DistributedError(
        concat("The backward pass of rank ", global_ranks_[static_cast<std::size_t>(rank_)],
               " failed, and those of the other ranks did not within ",
               text::format_seconds(timeout_.count() / 1e3),
               ". Only where all fail alike can they go on."),
        "backward", rank_);
  }
  check_present("backward");
}

std::exception_ptr GroupWatch::failed_alone_error(int world_rank, const OperationName& name) const {
  return std::make_exception_ptr(DistributedError(
      concat(
          name.text(), " failed because the backward pass of rank ", world_rank,
          " failed; the error is in its output. Only where all ranks fail alike can they go on."),
      name.operation, rank_));
}

std::exception_ptr GroupWatch::left_error(int world_rank, const OperationName& name) const {
  return std::make_exception_ptr(
      PeerLostError(concat(name.text(), " waits for rank ", world_rank,
                           ", which has left the run (it ended, or shut its groups down). All "
                           "ranks have to make the same calls."),
                    name.operation, rank_, world_rank));
}

std::exception_ptr GroupWatch::broken_connection(const std::exception_ptr& failure,
                                                 const OperationName& name) const {
  for (const auto& gone : liveness_->departures()) {
    if (std::find(global_ranks_.begin(), global_ranks_.end(), gone.rank) != global_ranks_.end()) {
      return left_error(gone.rank, name);
    }
  }
  return translate(failure, name, timeout_, debug_);
}

std::exception_ptr GroupWatch::explain(const std::exception_ptr& failure,
                                       const OperationName& name) const {
  const auto kind = classify(failure);
  if (kind == FailureKind::ours) return failure;
  // Whatever the backend says once a rank is lost, that is why.
  const auto loss = kind == FailureKind::connection
                        ? liveness_->wait_for_loss(liveness_->patience())
                        : liveness_->loss();
  if (loss) return lost_error(*loss, name, failure);
  if (kind == FailureKind::connection) return broken_connection(failure, name);
  std::string remark;
  if (const auto behind = liveness_->behind(); is_world_ && !behind.empty()) {
    remark = concat(" By its last sign of life, rank ", text::join(behind),
                    " had not started this operation.");
  }
  return translate(failure, name, timeout_, debug_, remark);
}

void GroupWatch::add(const c10::intrusive_ptr<ObservedWork>& work) {
  {
    const std::lock_guard lock(mutex_);
    works_.emplace(work.get(), work);
  }
  // A loss found before the work was entered told everyone but it.
  if (const auto loss = liveness_->final_loss())
    work->fail(lost_error(*loss, work->name(), nullptr));
}

void GroupWatch::remove(ObservedWork* work) {
  const std::lock_guard lock(mutex_);
  works_.erase(work);
}

bool GroupWatch::has_works() const {
  const auto works = under_way();
  return std::any_of(works.begin(), works.end(),
                     [](const auto& work) { return work->ends_by_itself(); });
}

std::vector<c10::intrusive_ptr<ObservedWork>> GroupWatch::under_way() const {
  std::vector<c10::intrusive_ptr<ObservedWork>> works;
  const std::lock_guard lock(mutex_);
  for (const auto& [ignored, weak] : works_) {
    if (auto work = weak.lock()) works.push_back(std::move(work));
  }
  return works;
}

void GroupWatch::peer_lost(const Loss& loss) {
  for (const auto& work : under_way()) work->fail(lost_error(loss, work->name(), nullptr));
  const std::lock_guard lock(abort_mutex_);
  for (c10d::Backend* backend : abortable_) backend->abort();
}

void GroupWatch::tick() {
  const auto now = Clock::now();
  const auto works = under_way();
  if (works.empty()) return;
  for (const auto& work : works) work->explain_by(now);
  for (const auto& gone : liveness_->departures()) {
    const auto member = std::find(global_ranks_.begin(), global_ranks_.end(), gone.rank);
    // What it sent before it left may still be on its way.
    if (member == global_ranks_.end() || now - gone.when < kOnTheWay) continue;
    const int in_group = static_cast<int>(member - global_ranks_.begin());
    for (const auto& work : works) {
      if (work->peer() >= 0 && work->peer() != in_group) continue;
      work->fail(left_error(gone.rank, work->name()));
    }
  }
  for (const auto& failed : liveness_->failed_alone(global_ranks_)) {
    if (now - failed.when < kOnTheWay) continue;
    broken_by_ = failed.rank;
    for (const auto& work : works) work->fail(failed_alone_error(failed.rank, work->name()));
  }
}

ObservedWork::ObservedWork(std::shared_ptr<GroupWatch> watch, const char* kind, c10d::OpType type,
                           int peer, c10::intrusive_ptr<c10d::Work> inner,
                           std::vector<at::Tensor> outputs, std::function<void()> finish)
    : Work(-1, type),
      watch_(std::move(watch)),
      name_(watch_->operation(kind)),
      peer_(peer),
      inner_(std::move(inner)),
      outputs_(std::move(outputs)),
      finish_(std::move(finish)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
}

void ObservedWork::start() {
  const auto self = c10::intrusive_ptr<ObservedWork>::unsafe_reclaim_from_nonowning(this);
  watch_->add(self);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = inner_->getFuture();
  } catch (const c10::Error&) {
    // gloo's sends and receives have no future: they make progress by themselves and are looked
    // after in wait().
    waits_for_inner_ = true;
    return;
  }
  future->addCallback([self](c10::ivalue::Future& done) {
    if (done.hasError()) {
      self->inner_failed(done.exception_ptr());
    } else {
      self->complete();
    }
  });
}

bool ObservedWork::claim() {
  {
    const std::lock_guard lock(settle_mutex_);
    if (std::exchange(settled_, true)) return false;
  }
  watch_->remove(this);
  return true;
}

void ObservedWork::complete() {
  if (!claim()) return;
  try {
    if (finish_) finish_();
  } catch (...) {
    const auto error =
        translate(std::current_exception(), name_, watch_->timeout(), watch_->debug());
    future_->setError(error);
    finish(error);
    return;
  }
  future_->markCompleted(c10::IValue(outputs_));
  finish();
}

void ObservedWork::fail(const std::exception_ptr& error) {
  if (!claim()) return;
  const auto kept = std::move(kept_);  // until this function returns
  future_->setError(error);
  finish(error);
  const c10d::OpType type = retrieveOpType();
  const bool point_to_point = type == c10d::OpType::SEND || type == c10d::OpType::RECV ||
                              type == c10d::OpType::RECVANYSOURCE;
  if (waits_for_inner_ && point_to_point) inner_->abort();
}

void ObservedWork::inner_failed(const std::exception_ptr& failure) {
  if (classify(failure) == FailureKind::connection && !watch_->knows_loss()) {
    // Who it was is known in a moment; this thread is the backend's and must not wait for it. Until
    // then the work holds on to itself: who waits for it may hold its future only, as
    // c10d::Reducer.
    const std::lock_guard lock(settle_mutex_);
    if (settled_) return;
    suspected_ = failure;
    suspected_until_ = Clock::now() + watch_->patience();
    kept_ = c10::intrusive_ptr<ObservedWork>::unsafe_reclaim_from_nonowning(this);
    return;
  }
  fail(watch_->explain(failure, name_));
}

void ObservedWork::explain_by(Clock::time_point now) {
  std::exception_ptr failure;
  {
    const std::lock_guard lock(settle_mutex_);
    if (settled_ || !suspected_ || now < suspected_until_) return;
    failure = suspected_;
  }
  fail(watch_->broken_connection(failure, name_));
}

bool ObservedWork::isCompleted() {
  const std::lock_guard lock(mutex_);
  return completed_;
}

bool ObservedWork::wait(milliseconds timeout) {
  if (waits_for_inner_ && !isCompleted()) {
    try {
      const bool arrived = inner_->wait(timeout == kNoTimeout ? watch_->timeout() : timeout);
      if (arrived) {
        complete();
      } else {
        inner_failed(std::make_exception_ptr(std::runtime_error("the operation was aborted")));
      }
    } catch (...) {
      inner_failed(std::current_exception());
    }
  }
  return Work::wait(timeout);
}

void ObservedWork::abort() { inner_->abort(); }

int ObservedWork::sourceRank() const { return inner_->sourceRank(); }

}  // namespace accelerate::comm
