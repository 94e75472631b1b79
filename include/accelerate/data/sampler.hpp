#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::serialize {
class OutputArchive;
class InputArchive;
}  // namespace torch::serialize
namespace torch::data::samplers {
class RandomSampler;
class SequentialSampler;
class DistributedRandomSampler;
class DistributedSequentialSampler;
}  // namespace torch::data::samplers

namespace accelerate::data {

/// Random order that is a function of seed and epoch alone, and so is equal on every process: the
/// permutation that `torch.randperm` gives for seed + epoch, as in the original's class of this
/// name. Has the interface of LibTorch's samplers, so it serves torch::data loaders too.
class SeedableRandomSampler {
 public:
  using BatchRequestType = std::vector<std::size_t>;
  explicit SeedableRandomSampler(std::int64_t size, std::int64_t seed = 0);

  /// The epoch whose order comes next; a pass to the end moves on to the next one.
  void set_epoch(std::int64_t epoch);
  std::int64_t epoch() const noexcept { return epoch_; }
  std::int64_t size() const noexcept { return size_; }
  /// The permutation of `epoch`, int64 of shape [size].
  at::Tensor order(std::int64_t epoch) const;

  void reset(std::optional<std::size_t> new_size = std::nullopt);
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size);

 private:
  std::int64_t size_;
  std::int64_t seed_;
  std::int64_t epoch_ = 0;
  std::int64_t position_ = 0;
  at::Tensor order_;
};

/// A sampler with the interface of torch::data::samplers::Sampler<>: `next(n)` gives the next n
/// indices of its order, fewer at the end, then nothing.
template <class S>
concept StreamSampler = requires(S sampler) {
  sampler.reset(std::optional<std::size_t>());
  { sampler.next(std::size_t(1)) } -> std::same_as<std::optional<std::vector<std::size_t>>>;
};
/// A sampler that makes the batches itself: `next()` gives the indices of a batch.
template <class S>
concept BatchSampler = requires(S sampler) {
  { sampler.next() } -> std::same_as<std::optional<std::vector<std::size_t>>>;
  sampler.reset();
};
template <class S>
concept AnySampler = StreamSampler<S> || BatchSampler<S>;

/// A sampler without its type. Fields are empty where the sampler cannot do a thing.
struct ErasedSampler {
  /// Begins a new order, of another size if one is given. LibTorch's default CPU generator is
  /// seeded alike on all processes around this call.
  std::function<void(std::optional<std::size_t> new_size)> reset;
  /// The next `count` indices; a batch sampler ignores `count`.
  std::function<std::optional<std::vector<std::size_t>>(std::size_t count)> next;
  std::function<void(torch::serialize::OutputArchive&)> save;
  std::function<void(torch::serialize::InputArchive&)> load;
  std::function<void(std::int64_t)> set_epoch;
  /// `next` gives whole batches.
  bool makes_batches = false;
  /// Its order is known to end, so it is read at once: that makes it seekable.
  bool bounded = false;
  /// What it draws comes from the default generator alone, so its state needs no saving.
  bool reproducible = false;
};

namespace detail {
template <class S>
inline constexpr bool kTorchSampler =
    std::is_same_v<S, torch::data::samplers::RandomSampler> ||
    std::is_same_v<S, torch::data::samplers::SequentialSampler> ||
    std::is_same_v<S, torch::data::samplers::DistributedRandomSampler> ||
    std::is_same_v<S, torch::data::samplers::DistributedSequentialSampler>;
}  // namespace detail

/// Hides the type of `sampler`, which the result shares.
template <AnySampler S>
ErasedSampler erase_sampler(std::shared_ptr<S> sampler) {
  ErasedSampler erased;
  if constexpr (StreamSampler<S>) {
    erased.reset = [sampler](std::optional<std::size_t> size) { sampler->reset(size); };
    erased.next = [sampler](std::size_t count) { return sampler->next(count); };
  } else {
    erased.reset = [sampler](std::optional<std::size_t>) { sampler->reset(); };
    erased.next = [sampler](std::size_t) { return sampler->next(); };
    erased.makes_batches = true;
  }
  if constexpr (requires(S & s, torch::serialize::OutputArchive & out,
                         torch::serialize::InputArchive & in) {
                  s.save(out);
                  s.load(in);
                }) {
    erased.save = [sampler](torch::serialize::OutputArchive& archive) { sampler->save(archive); };
    erased.load = [sampler](torch::serialize::InputArchive& archive) { sampler->load(archive); };
  }
  if constexpr (requires(S & s) { s.set_epoch(std::size_t(0)); }) {
    erased.set_epoch = [sampler](std::int64_t epoch) { sampler->set_epoch(epoch); };
  }
  erased.reproducible = detail::kTorchSampler<S> || std::is_same_v<S, SeedableRandomSampler>;
  erased.bounded = erased.reproducible || requires(S & s) { s.size(); };
  return erased;
}

/// The order of indices of one pass after another. `begin` starts a pass; within it positions count
/// from 0.
class IndexOrder {
 public:
  virtual ~IndexOrder() = default;
  /// Starts the pass of `epoch`; `seed` decides what is random in it. With `resumed`, the state
  /// given to `load_state` is that of this very pass.
  virtual void begin(std::int64_t seed, std::int64_t epoch, bool resumed) = 0;
  /// The next pass is over the first `size` indices only.
  virtual void limit(std::int64_t /*size*/) {}
  /// Indices in the pass, where known before it ends.
  virtual std::optional<std::int64_t> size() const = 0;
  /// Looks ahead until position `end` - 1 is known to exist or the end is found. Returns the number
  /// of positions known to exist.
  virtual std::int64_t ensure(std::int64_t end) = 0;
  /// Writes the indices at [first, first + count), all of them ensured. Positions before `first`
  /// are forgotten, except the first `keep` of the pass.
  virtual void read(std::int64_t first, std::int64_t count, std::size_t* out) = 0;
  /// Positions from 0 that must stay readable.
  virtual void keep(std::int64_t) {}
  /// State beyond seed and epoch, as bytes: that at the begin of the present pass, or that before
  /// the next one. Empty when there is none.
  virtual std::string save_state(bool /*in_pass*/) { return {}; }
  virtual void load_state(const std::string& bytes);
};

/// [offset, offset + size) in order, or in SeedableRandomSampler's.
std::unique_ptr<IndexOrder> sequential_order(std::int64_t size, std::int64_t offset = 0);
std::unique_ptr<IndexOrder> shuffled_order(std::int64_t size, std::int64_t offset = 0);
/// The order of a user's sampler that gives a stream. A bounded sampler that was made with the size
/// 0 takes that of the dataset.
std::unique_ptr<IndexOrder> sampler_order(ErasedSampler sampler,
                                          std::optional<std::int64_t> dataset_size = std::nullopt);

/// Starts a pass of the user's sampler. `state`, if not empty, is loaded first: with `resumed` it
/// is the sampler's state in this very pass, else that before it.
void begin_sampler(const ErasedSampler& sampler, const std::string& state, std::int64_t seed,
                   std::int64_t epoch, bool resumed);

/// Calls `function` while LibTorch's default CPU generator is seeded with `seed`; its own state
/// comes back afterwards.
void with_seeded_generator(std::int64_t seed, const std::function<void()>& function);
/// A seed from LibTorch's default CPU generator.
std::int64_t draw_seed();
/// The state of a sampler or dataset that knows LibTorch's archives, as bytes.
std::string archive_bytes(const std::function<void(torch::serialize::OutputArchive&)>& save);
void from_archive_bytes(const std::string& bytes,
                        const std::function<void(torch::serialize::InputArchive&)>& load);

}  // namespace accelerate::data
