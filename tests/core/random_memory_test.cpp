// Random state, and the search for a batch size that fits.
#include <accelerate/base/error.hpp>
#include <accelerate/core/memory.hpp>
#include <accelerate/core/random.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace accelerate {
namespace {

at::Tensor draw() { return at::rand({5}); }

TEST(Random, SeedsTheSameAndOtherwisePerRank) {
  set_seed(42);
  const at::Tensor first = draw();
  set_seed(42);
  EXPECT_TRUE(draw().equal(first));
  set_seed(42, SeedOptions().rank(1));
  EXPECT_TRUE(draw().equal(first));
  set_seed(42, SeedOptions().device_specific(true).rank(1));
  const at::Tensor other = draw();
  EXPECT_FALSE(other.equal(first));
  set_seed(43);
  EXPECT_TRUE(draw().equal(other));
}

TEST(Random, AsksForDeterministicAlgorithms) {
  set_seed(1);
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
  set_seed(1, SeedOptions().deterministic(true));
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  EXPECT_FALSE(at::globalContext().deterministicAlgorithmsWarnOnly());
  at::globalContext().setDeterministicAlgorithms(false, false);
}

TEST(Random, GoesBackToACapturedState) {
  set_seed(7);
  draw();
  const RngState state = RngState::capture();
  EXPECT_TRUE(state.states().contains("cpu"));
  const at::Tensor next = draw();
  state.restore();
  EXPECT_TRUE(draw().equal(next));
  const RngState copy = RngState::from_json(Json::parse(state.to_json().dump()));
  EXPECT_EQ(copy, state);
  copy.restore();
  EXPECT_TRUE(draw().equal(next));
}

TEST(Random, RefusesStatesThatAreNone) {
  EXPECT_THROW(RngState::from_json(Json::array()), DataError);
  EXPECT_THROW(RngState::from_json(Json{{"cpu", "0g"}}), DataError);
  EXPECT_THROW(RngState::from_json(Json{{"cpu", 3}}), DataError);
  set_seed(7);
  const at::Tensor first = draw();
  set_seed(7);
  EXPECT_THROW(RngState::from_json(Json{{"cpu", "00ff"}}).restore(), DataError);
  EXPECT_THROW(RngState::from_json(Json{{"cpu", "00ff"}, {"cuda:99", "00"}}).restore(), StateError);
  EXPECT_TRUE(draw().equal(first));
}

/// What synchronize_rng_states needs of a group: here, one whose rank 0 sends `sent`.
struct Broadcaster {
  std::string sent;
  int size() const { return 2; }
  std::string broadcast_bytes(const std::string&, int) const { return sent; }
};

TEST(Random, TakesTheStateOfRankZero) {
  for (RngType type : {RngType::torch, RngType::cuda, RngType::generator})
    EXPECT_EQ(rng_type_from_string(to_string(type)), type);
  EXPECT_THROW(rng_type_from_string("numpy"), ConfigError);
  auto own = at::make_generator<at::CPUGeneratorImpl>(5),
       other = at::make_generator<at::CPUGeneratorImpl>(6);
  synchronize_rng_states({RngType::generator}, Broadcaster{generator_state(other)}, own);
  EXPECT_TRUE(at::rand({3}, own).equal(at::rand({3}, other)));
  set_seed(3);
  const std::string state = generator_state(generator_of(RngType::torch, {}));
  const at::Tensor expected = draw();
  synchronize_rng_states({RngType::torch}, Broadcaster{state});
  EXPECT_TRUE(draw().equal(expected));
  EXPECT_THROW(synchronize_rng_states({RngType::generator}, Broadcaster{state}), ConfigError);
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return describe(error);
  }
  return "nothing was thrown";
}

TEST(Memory, RecognisesThatItRanOut) {
  const auto recognised = [](auto error) {
    return is_out_of_memory(std::make_exception_ptr(error));
  };
  EXPECT_TRUE(recognised(std::bad_alloc()));
  EXPECT_TRUE(recognised(OutOfMemoryError("full")));
  EXPECT_TRUE(recognised(c10::OutOfMemoryError({"", "", 0}, "CUDA: no more")));
  for (const char* message : {"CUDA out of memory. Tried to allocate 2 GiB",
                              "CUDA error: out of memory", "MPS backend out of memory",
                              "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear",
                              "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
                              "[enforce fail] DefaultCPUAllocator: can't allocate memory: you "
                              "tried to allocate 9 bytes"}) {
    EXPECT_TRUE(recognised(std::runtime_error(message))) << message;
  }
  EXPECT_FALSE(recognised(std::runtime_error("shape mismatch")));
  EXPECT_FALSE(recognised(3));
  try {
    try {
      throw std::bad_alloc();
    } catch (...) {
      std::throw_with_nested(StateError("in the forward"));
    }
  } catch (const std::exception& error) {
    EXPECT_TRUE(is_out_of_memory(error));
  }
}

TEST(Memory, RecognisesLibTorchsOwnError) {
  std::exception_ptr error;
  try {
    at::empty({std::int64_t{1} << 50});
  } catch (...) {
    error = std::current_exception();
  }
  ASSERT_TRUE(error);
  EXPECT_TRUE(is_out_of_memory(error));
}

TEST(Memory, FindsABatchSizeAsTheOriginalDoes) {
  std::vector<std::int64_t> tried;
  const auto fits = [&](std::int64_t size) {
    tried.push_back(size);
    if (size > 8) throw std::runtime_error("CUDA out of memory. Tried to allocate");
    return std::to_string(size);
  };
  EXPECT_EQ(find_executable_batch_size(fits), "8");
  EXPECT_EQ(tried, (std::vector<std::int64_t>{128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36,
                                              32,  28,  25,  22, 19, 17, 15, 13, 11, 9,  8}));
  tried.clear();
  find_executable_batch_size([&](std::int64_t size) { fits(size); },
                             BatchSizeOptions().starting_batch_size(40).reduce(
                                 [](std::int64_t size) { return size / 2; }));
  EXPECT_EQ(tried, (std::vector<std::int64_t>{40, 20, 10, 5}));
}

TEST(Memory, EndsItsSearchWithAReason) {
  const auto never = [](std::int64_t) { throw std::bad_alloc(); };
  EXPECT_THROW(find_executable_batch_size(never, BatchSizeOptions().starting_batch_size(3)),
               OutOfMemoryError);
  EXPECT_NE(message_of([&] { find_executable_batch_size(never); }).find("zero"), std::string::npos);
  EXPECT_THROW(find_executable_batch_size(never, BatchSizeOptions().starting_batch_size(0)),
               ConfigError);
  EXPECT_THROW(find_executable_batch_size(
                   never, BatchSizeOptions().reduce([](std::int64_t size) { return size; })),
               ConfigError);
  EXPECT_THROW(find_executable_batch_size(never, BatchSizeOptions().reduce(nullptr)), ConfigError);
  int calls = 0;
  EXPECT_THROW(find_executable_batch_size([&](std::int64_t) {
                 ++calls;
                 throw std::out_of_range("a bug");
               }),
               std::out_of_range);
  EXPECT_EQ(calls, 1);
}

/// Three ranks as threads: what find_executable_batch_size needs of a group.
class Ranks {
 public:
  std::vector<std::string> gather(int rank, const std::string& bytes) {
    std::unique_lock lock(mutex_);
    const int round = round_;
    parts_[rank] = bytes;
    if (++arrived_ == 3) {
      result_ = parts_;
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    } else if (!changed_.wait_for(lock, std::chrono::seconds(20),
                                  [&] { return round_ != round; })) {
      throw TimeoutError("the others did not come", "all_gather", rank);
    }
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0, round_ = 0;
  std::vector<std::string> parts_ = std::vector<std::string>(3), result_;
};

struct ThreadGroup {
  Ranks* ranks;
  int rank_;
  int rank() const { return rank_; }
  int size() const { return 3; }
  ThreadGroup split(int, int, const std::string&) const { return *this; }
  std::vector<std::string> all_gather_bytes(const std::string& bytes) const {
    return ranks->gather(rank_, bytes);
  }
};

// What each of three ranks ended with: the batch size, or the message of what was thrown.
std::vector<std::string> on_three_ranks(
    const std::function<void(int rank, std::int64_t size)>& attempt,
    const std::function<std::int64_t(int rank)>& start = [](int) { return 64; }) {
  Ranks ranks;
  std::vector<std::string> results(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = message_of([&] {
        throw std::runtime_error(find_executable_batch_size(
            [&](std::int64_t size) {
              attempt(rank, size);
              return std::to_string(size);
            },
            BatchSizeOptions().starting_batch_size(start(rank)).reduce([](std::int64_t size) {
              return size / 2;
            }),
            ThreadGroup{&ranks, rank}));
      });
    });
  }
  for (auto& thread : threads) thread.join();
  return results;
}

TEST(Memory, AllRanksAgreeOnABatchSize) {
  // Rank 1 has less memory than the others.
  const auto results = on_three_ranks([](int rank, std::int64_t size) {
    if (size > (rank == 1 ? 10 : 40)) throw std::bad_alloc();
  });
  EXPECT_EQ(results, (std::vector<std::string>{"8", "8", "8"}));
}

TEST(Memory, AllRanksEndWhenOneFails) {
  const auto results = on_three_ranks([](int rank, std::int64_t) {
    if (rank == 2) throw std::runtime_error("a bug");
  });
  EXPECT_EQ(results[2], "a bug");
  for (int rank : {0, 1}) {
    EXPECT_NE(results[rank].find("failed on rank 2"), std::string::npos) << results[rank];
    EXPECT_NE(results[rank].find("a bug"), std::string::npos) << results[rank];
  }
}

TEST(Memory, AllRanksEndWhenACollectiveWasLeft) {
  // Rank 0 runs out while the others wait for it, until their collective times out.
  const auto results = on_three_ranks([](int rank, std::int64_t) {
    if (rank == 0) throw std::bad_alloc();
    throw TimeoutError("rank 0 did not come", "all_reduce", rank);
  });
  for (const std::string& result : results) {
    EXPECT_NE(result.find("Memory ran out on rank 0 with batch size 64"), std::string::npos)
        << result;
    EXPECT_NE(result.find("at most 32"), std::string::npos) << result;
  }
}

TEST(Memory, RanksMustStartAlike) {
  for (const std::string& result :
       on_three_ranks([](int, std::int64_t) {}, [](int rank) { return rank == 2 ? 32 : 64; })) {
    EXPECT_NE(result.find("tried batch size"), std::string::npos) << result;
  }
}

TEST(Memory, LetsGoOfWhatItIsGiven) {
  at::Tensor tensor = at::empty({4});
  std::weak_ptr<int> watched;
  auto pointer = std::make_shared<int>(3);
  watched = pointer;
  std::vector<at::Tensor> list{tensor};
  release_memory(tensor, pointer, list);
  EXPECT_FALSE(tensor.defined());
  EXPECT_TRUE(watched.expired());
  EXPECT_TRUE(list.empty());
}

}  // namespace
}  // namespace accelerate
