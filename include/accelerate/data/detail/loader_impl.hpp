#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/core/tree.hpp>
#include <accelerate/core/tree_codec.hpp>
#include <accelerate/data/detail/batch_check.hpp>
#include <accelerate/data/detail/device_transfer.hpp>
#include <accelerate/data/detail/pipeline.hpp>
#include <accelerate/data/loader_core.hpp>

#include <algorithm>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace accelerate::data::detail {

/// A message of the dispatcher: a part of a step and the bytes of its batch.
struct Dispatched {
  enum class Kind { batch, end, error };
  Kind kind = Kind::end;
  /// No rank has a batch after this step, so no message follows.
  bool final = true;
  StepShare share;
  std::int64_t remainder = -1;
  std::int64_t position_after = 0;
  std::string payload;

  std::string encode() const;
  static Dispatched decode(const std::string& bytes);
};

/// A loader of known batch type over any source of data. Subclasses say what a step is and read it.
template <class Batch>
class LoaderImpl : public LoaderCore {
  static_assert(TensorTree<Batch>,
                "A batch of this loader has a type whose tensors the library does not know, so it "
                "could not be moved to the device or cut. A batch is a tensor, or a pair, tuple, "
                "vector, map or optional of such, or torch::data::Example; teach a struct of yours "
                "by specialising accelerate::TreeTraits (see <accelerate/core/tree.hpp>).");

 public:
  LoaderImpl(LoaderSettings settings, LoaderContext context)
      : LoaderCore(std::move(settings), std::move(context)) {}

  /// Call once after construction: threads may start, which need the whole object.
  void open(bool concurrent, bool dispatch) {
    set_dispatch(dispatch);
    if (context_.device_placement) {
      const auto& configuration = context_.configuration;
      transfer_ = std::make_unique<DeviceTransfer>(context_.device, configuration.non_blocking(),
                                                   configuration.pin_memory(),
                                                   configuration.prefetch_to_device() > 0);
      if (transfer_->asynchronous())
        ahead_ = static_cast<std::size_t>(configuration.prefetch_to_device());
    }
    if (!dispatch) {
      batches_ = std::make_unique<Pipeline<Batch>>(
          settings_.workers, settings_.max_jobs, concurrent,
          [this](Step& step) { return plan(step); },
          [this](Step& step) { return staged(read(step, 0)); });
      return;
    }
    if constexpr (std::is_default_constructible_v<Batch>) {
      if (context_.group.rank() == 0 && context_.copies.rank() == 0) {
        parts_ = std::make_unique<Pipeline<std::vector<std::string>>>(
            settings_.workers, settings_.max_jobs, concurrent,
            [this](Step& step) { return plan(step); },
            [this](Step& step) { return encode_parts(step); });
      }
    } else {
      throw UnsupportedError("dispatch_batches was asked for the loader '" + name() +
                             "', and its batches cannot be sent to another process: they must be "
                             "default-constructible. Switch dispatch_batches off.");
    }
  }

  /// Begins a pass.
  void start() {
    const Pass pass = begin_pass();
    ready_.clear();
    exhausted_ = ended_ = false;
    error_ = nullptr;
    try {
      if (reads()) begin_stream(pass);
      if (batches_) batches_->begin();
      if (parts_) parts_->begin();
    } catch (...) {
      // The others wait for this process' first batch.
      fail_first();
      finish();
      throw;
    }
  }

  /// Reads the next batch; false at the end of the pass.
  bool advance() {
    current_.reset();
    while (ready_.size() <= ahead_ && !exhausted_ && !error_) {
      try {
        Ready next;
        if (fetch(next)) {
          send(next);
          ready_.push_back(std::move(next));
        } else {
          exhausted_ = true;
        }
      } catch (...) {
        error_ = std::current_exception();
      }
    }
    if (ready_.empty()) {
      if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
      return false;
    }
    Ready ready = std::move(ready_.front());
    ready_.pop_front();
    arrive(ready);
    current_ = std::move(ready.batch);
    show_step(ready.share, ready.remainder, ready.position_after);
    return true;
  }

  Batch& current() { return *current_; }

  /// Ends the pass.
  void finish() noexcept {
    if (batches_) batches_->stop();
    if (parts_) parts_->stop();
    current_.reset();
    ready_.clear();
    end_pass();
  }

 protected:
  /// Starts the data of a pass.
  virtual void begin_stream(const Pass& pass) = 0;
  virtual bool plan(Step& step) = 0;
  /// The batch of one of `step.shares`. Where units are not samples, changes the shares to count
  /// samples.
  virtual Batch read(Step& step, std::size_t part) = 0;

  /// Subclasses call this in their destructor: workers use them.
  void close() noexcept {
    finish();
    batches_.reset();
    parts_.reset();
  }

 private:
  struct Ready {
    std::optional<Batch> batch;
    StepShare share;
    std::int64_t remainder = -1;
    std::int64_t position_after = 0;
    std::shared_ptr<DeviceTransfer::Ticket> ticket;
  };

  bool reads() const noexcept { return batches_ || parts_; }

  Batch staged(Batch batch) const {
    if (transfer_ && transfer_->asynchronous()) {
      tree::for_each_tensor(batch, [&](at::Tensor& tensor) {
        if (tensor.defined()) tensor = transfer_->stage(tensor);
      });
    }
    return batch;
  }

  // The next batch of this process on the host.
  bool fetch(Ready& next) {
    bool found = false;
    if (batches_) {
      try {
        if (auto* slot = batches_->next(settings_.timeout, [this] { time_out(); })) {
          next = {std::move(slot->item), slot->step.shares.front(), slot->step.remainder,
                  slot->step.position_after, nullptr};
          slot->item.reset();
          found = true;
        }
      } catch (...) {
        fail_first();
        rethrow_reading(batches_->failed()->step);
      }
    } else {
      found = receive(next);
    }
    if (!found) {
      if (!compared_) compare_first_batch("", "");
      return false;
    }
    try {
      check_.check(*next.batch, settings_.varying_shapes, name());
    } catch (...) {
      fail_first();
      throw;
    }
    if (!compared_) compare_first_batch(check_.signature(), "");
    return true;
  }

  // Tells the other processes about the exception in flight if they wait for the first batch.
  void fail_first() {
    if (compared_ || dispatches()) return;
    try {
      throw;
    } catch (const std::exception& error) {
      compare_first_batch("", describe(error));
    } catch (...) {
      compare_first_batch("", "something that is not a std::exception");
    }
  }

  std::vector<std::string> encode_parts(Step& step) {
    std::vector<std::string> parts(step.shares.size());
    for (std::size_t part = 0; part < parts.size(); ++part) {
      if (!step.shares[part].exists) continue;
      parts[part] = tree::encode(read(step, part));
    }
    for (std::size_t part = 0; part < parts.size(); ++part) {
      Dispatched message;
      message.final =
          std::none_of(step.shares.begin(), step.shares.end(),
                       [](const StepShare& share) { return share.exists && !share.last; });
      message.kind = step.shares[part].exists ? Dispatched::Kind::batch : Dispatched::Kind::end;
      message.share = step.shares[part];
      message.remainder = step.remainder;
      message.position_after = step.position_after;
      message.payload = std::move(parts[part]);
      parts[part] = message.encode();
    }
    return parts;
  }

  bool receive(Ready& next) {
    if constexpr (std::is_default_constructible_v<Batch>) {
      // The last message says so itself. A rank whose own batches end earlier still takes part
      // until then.
      if (ended_) return false;
      std::vector<std::string> parts;
      std::exception_ptr error;
      if (parts_) {
        Dispatched message;
        try {
          if (auto* slot = parts_->next(settings_.timeout, [this] { time_out(); })) {
            parts = std::move(*slot->item);
            slot->item.reset();
          }
        } catch (...) {
          error = wrapped(parts_->failed()->step);
          message.kind = Dispatched::Kind::error;
          message.payload = described(error);
        }
        if (parts.empty()) parts.assign(context_.group.size(), message.encode());
      }
      std::string own;
      if (context_.copies.rank() == 0) own = context_.group.scatter_bytes(parts);
      const Dispatched message = Dispatched::decode(context_.copies.broadcast_bytes(own));
      if (error) std::rethrow_exception(error);
      if (message.kind == Dispatched::Kind::error)
        throw DataError("Process 0 could not read for the others: " + message.payload);
      ended_ = message.final;
      if (message.kind == Dispatched::Kind::end) return false;
      next.batch.emplace(tree::decode<Batch>(message.payload));
      next.batch = staged(std::move(*next.batch));
      next.share = message.share;
      next.remainder = message.remainder;
      next.position_after = message.position_after;
      return true;
    } else {
      return false;
    }
  }

  std::exception_ptr wrapped(const Step& step) const {
    try {
      rethrow_reading(step);
    } catch (...) {
      return std::current_exception();
    }
  }
  static std::string described(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& exception) {
      return exception.what();
    }
  }

  [[noreturn]] void time_out() const {
    throw DataError("no batch came within " + std::to_string(settings_.timeout->count()) +
                    " ms, the timeout of the loader's options. Raise it, or use more workers");
  }

  void send(Ready& ready) {
    if (!transfer_) return;
    const auto moves = [&] {
      tree::for_each_tensor(*ready.batch, [&](at::Tensor& tensor) {
        if (tensor.defined() && tensor.device() != transfer_->device())
          tensor = transfer_->move(tensor);
      });
    };
    if (transfer_->asynchronous()) {
      ready.ticket = transfer_->run(moves);
    } else {
      moves();
    }
  }

  void arrive(Ready& ready) {
    if (!ready.ticket) return;
    transfer_->finish(*ready.ticket);
    tree::for_each_tensor(*ready.batch, [&](at::Tensor& tensor) {
      if (tensor.defined()) transfer_->adopt(tensor);
    });
  }

  BatchCheck check_;
  std::unique_ptr<DeviceTransfer> transfer_;
  std::size_t ahead_ = 0;
  std::deque<Ready> ready_;
  std::optional<Batch> current_;
  bool exhausted_ = false;
  bool ended_ = false;
  std::exception_ptr error_;
  std::unique_ptr<Pipeline<Batch>> batches_;
  std::unique_ptr<Pipeline<std::vector<std::string>>> parts_;
};

}  // namespace accelerate::data::detail
