#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/data/sampler.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <mutex>
#include <sstream>

namespace accelerate::data {
namespace {

at::Tensor permutation(std::int64_t size, std::int64_t seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randperm(size, generator, at::TensorOptions().dtype(at::kLong));
}

class SequentialOrder final : public IndexOrder {
 public:
  SequentialOrder(std::int64_t size, std::int64_t offset)
      : all_(size), size_(size), offset_(offset) {}
  void limit(std::int64_t size) override { limit_ = size; }
  void begin(std::int64_t, std::int64_t, bool) override {
    size_ = std::exchange(limit_, std::nullopt).value_or(all_);
  }
  std::optional<std::int64_t> size() const override { return size_; }
  std::int64_t ensure(std::int64_t) override { return size_; }
  void read(std::int64_t first, std::int64_t count, std::size_t* out) override {
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<std::size_t>(offset_ + first + i);
  }

 private:
  std::int64_t all_;
  std::int64_t size_;
  std::int64_t offset_;
  std::optional<std::int64_t> limit_;
};

class ShuffledOrder final : public IndexOrder {
 public:
  ShuffledOrder(std::int64_t size, std::int64_t offset)
      : all_(size), size_(size), offset_(offset) {}
  void limit(std::int64_t size) override { limit_ = size; }
  void begin(std::int64_t seed, std::int64_t, bool) override {
    size_ = std::exchange(limit_, std::nullopt).value_or(all_);
    if (order_.defined() && order_.numel() == size_ && seed == seed_) return;
    order_ = permutation(size_, seed);
    indices_ = order_.const_data_ptr<std::int64_t>();
    seed_ = seed;
  }
  std::optional<std::int64_t> size() const override { return size_; }
  std::int64_t ensure(std::int64_t) override { return size_; }
  void read(std::int64_t first, std::int64_t count, std::size_t* out) override {
    for (std::int64_t i = 0; i < count; ++i)
      out[i] = static_cast<std::size_t>(offset_ + indices_[first + i]);
  }

 private:
  std::int64_t all_;
  std::int64_t size_;
  std::int64_t offset_;
  std::optional<std::int64_t> limit_;
  std::int64_t seed_ = 0;
  at::Tensor order_;
  const std::int64_t* indices_ = nullptr;
};

// The order of a user's sampler. A bounded one is read at once; of any other only what is between
// the step in hand and the look-ahead is kept, and the start, which fills the last step.
class SamplerOrder final : public IndexOrder {
 public:
  SamplerOrder(ErasedSampler sampler, std::optional<std::int64_t> dataset_size)
      : sampler_(std::move(sampler)) {
    if (!sampler_.bounded) return;
    const auto count = [&](std::optional<std::size_t> new_size) {
      with_seeded_generator(0, [&] { sampler_.reset(new_size); });
      std::int64_t found = 0;
      while (auto indices = sampler_.next(kEverything)) {
        if (indices->empty()) break;
        found += static_cast<std::int64_t>(indices->size());
      }
      return found;
    };
    size_ = count(std::nullopt);
    if (size_ == 0 && dataset_size) size_ = count(static_cast<std::size_t>(*dataset_size));
  }

  void begin(std::int64_t seed, std::int64_t epoch, bool resumed) override {
    begin_sampler(sampler_, std::exchange(loaded_, {}), seed, epoch, resumed);
    at_begin_ = save_state(false);
    window_.clear();
    base_ = 0;
    start_.clear();
    pulled_ = 0;
    ended_ = false;
    if (sampler_.bounded) {
      keep_ = 0;
      ensure(std::numeric_limits<std::int64_t>::max());
      size_ = pulled_;
    }
  }

  std::optional<std::int64_t> size() const override {
    return ended_ ? std::optional(pulled_) : size_;
  }

  std::int64_t ensure(std::int64_t end) override {
    while (!ended_ && pulled_ < end) {
      const auto want = sampler_.bounded ? kEverything : static_cast<std::size_t>(end - pulled_);
      auto indices = sampler_.next(want);
      if (!indices || indices->empty()) {
        ended_ = true;
        break;
      }
      for (const std::size_t index : *indices) {
        if (static_cast<std::int64_t>(start_.size()) < keep_) start_.push_back(index);
        window_.push_back(index);
      }
      pulled_ += static_cast<std::int64_t>(indices->size());
    }
    return pulled_;
  }

  void read(std::int64_t first, std::int64_t count, std::size_t* out) override {
    if (first + count <= static_cast<std::int64_t>(start_.size())) {
      std::copy_n(start_.begin() + first, count, out);
      return;
    }
    std::copy_n(window_.begin() + (first - base_), count, out);
    if (sampler_.bounded) return;
    window_.erase(window_.begin(), window_.begin() + (first - base_));
    base_ = first;
  }

  void keep(std::int64_t count) override { keep_ = count; }
  std::string save_state(bool in_pass) override {
    if (!sampler_.save || sampler_.reproducible) return {};
    return in_pass ? at_begin_ : archive_bytes(sampler_.save);
  }
  void load_state(const std::string& bytes) override { loaded_ = bytes; }

 private:
  // Halved because samplers add it to a position.
  static constexpr std::size_t kEverything = std::numeric_limits<std::int64_t>::max() / 2;

  ErasedSampler sampler_;
  std::optional<std::int64_t> size_;
  std::deque<std::size_t> window_;
  std::int64_t base_ = 0;
  std::vector<std::size_t> start_;
  std::int64_t keep_ = 0;
  std::int64_t pulled_ = 0;
  bool ended_ = false;
  std::string at_begin_;
  std::string loaded_;
};

}  // namespace

SeedableRandomSampler::SeedableRandomSampler(std::int64_t size, std::int64_t seed)
    : size_(size), seed_(seed) {
  if (size < 0)
    throw ConfigError(text::concat("SeedableRandomSampler was given the size ", size,
                                   "; it must not be negative."));
}

void SeedableRandomSampler::set_epoch(std::int64_t epoch) {
  epoch_ = epoch;
  order_ = at::Tensor();
  position_ = 0;
}

at::Tensor SeedableRandomSampler::order(std::int64_t epoch) const {
  return permutation(size_, seed_ + epoch);
}

void SeedableRandomSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size) size_ = static_cast<std::int64_t>(*new_size);
  order_ = at::Tensor();
  position_ = 0;
}

std::optional<std::vector<std::size_t>> SeedableRandomSampler::next(std::size_t batch_size) {
  if (!order_.defined()) {
    if (position_ > 0) return std::nullopt;
    order_ = order(epoch_);
  }
  const auto count = std::min<std::int64_t>(
      size_ - position_, static_cast<std::int64_t>(std::min<std::size_t>(batch_size, size_)));
  if (count <= 0) {
    ++epoch_;
    order_ = at::Tensor();
    return std::nullopt;
  }
  const auto* indices = order_.const_data_ptr<std::int64_t>() + position_;
  position_ += count;
  return std::vector<std::size_t>(indices, indices + count);
}

void IndexOrder::load_state(const std::string& bytes) {
  if (!bytes.empty()) {
    throw DataError(
        "The state of a sampler of the user's was saved, and the loader now has an order of its "
        "own. Give it the same sampler.");
  }
}

std::unique_ptr<IndexOrder> sequential_order(std::int64_t size, std::int64_t offset) {
  return std::make_unique<SequentialOrder>(size, offset);
}
std::unique_ptr<IndexOrder> shuffled_order(std::int64_t size, std::int64_t offset) {
  return std::make_unique<ShuffledOrder>(size, offset);
}
std::unique_ptr<IndexOrder> sampler_order(ErasedSampler sampler,
                                          std::optional<std::int64_t> dataset_size) {
  return std::make_unique<SamplerOrder>(std::move(sampler), dataset_size);
}

void begin_sampler(const ErasedSampler& sampler, const std::string& state, std::int64_t seed,
                   std::int64_t epoch, bool resumed) {
  if (!state.empty()) {
    if (!sampler.load) {
      throw DataError(
          "The state of a sampler was saved, and the sampler given now has no load() to take it.");
    }
    from_archive_bytes(state, sampler.load);
    if (resumed) return;
  }
  if (sampler.set_epoch) sampler.set_epoch(epoch);
  with_seeded_generator(seed, [&] { sampler.reset(std::nullopt); });
}

void with_seeded_generator(std::int64_t seed, const std::function<void()>& function) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  at::Tensor before;
  {
    const std::scoped_lock lock(generator.mutex());
    before = generator.get_state();
    generator.set_current_seed(static_cast<std::uint64_t>(seed));
  }
  const auto restore = [&] {
    const std::scoped_lock lock(generator.mutex());
    generator.set_state(before);
  };
  try {
    function();
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

std::int64_t draw_seed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::scoped_lock lock(generator.mutex());
  return static_cast<std::int64_t>(
      at::check_generator<at::CPUGeneratorImpl>(generator)->random64() >> 1);
}

std::string archive_bytes(const std::function<void(torch::serialize::OutputArchive&)>& save) {
  torch::serialize::OutputArchive archive;
  save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return std::move(out).str();
}

void from_archive_bytes(const std::string& bytes,
                        const std::function<void(torch::serialize::InputArchive&)>& load) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(in);
    load(archive);
  } catch (const c10::Error&) {
    std::throw_with_nested(DataError(
        "The saved state of a sampler cannot be read. It is damaged, or another sampler's."));
  }
}

}  // namespace accelerate::data
