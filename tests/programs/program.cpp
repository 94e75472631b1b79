#include <programs/program.hpp>
#include <support/distributed.hpp>

#include <accelerate/base/text.hpp>

#include <gtest/gtest.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

namespace programs {

using accelerate::AcceleratorOptions;
using accelerate::StrategyKind;
using accelerate::testing::data_parallel;
using accelerate::testing::world;
using accelerate::text::concat;

void Sharded::backward(const at::Tensor& loss) {
  if (loss.defined() && loss.numel() == 1) {
    const at::NoGradGuard no_grad;
    // As the plain run notes it.
    values_.note(concat("loss ", losses_++), loss.detach() / gradient_accumulation_steps());
  }
  Accelerator::backward(loss);
}

void Sharded::backward(const at::Tensor& loss_sum, double count) {
  values_.note(concat("loss ", losses_++), loss_sum);
  Accelerator::backward(loss_sum, count);
}

at::Tensor Sharded::mean(const at::Tensor& tensor) const {
  return reduce(tensor.detach(), accelerate::comm::Reduction::mean);
}

void Sharded::check() {
  const std::string check = concat("check ", checks_++, ": ");
  for (std::size_t m = 0; m < modules_.size(); ++m) {
    const auto core = modules_[m].lock();
    if (core == nullptr) continue;
    const std::string name = concat(check, "module ", m, " ");
    const accelerate::ModuleRecord& record = core->strategy->module();
    // A tied tensor is in the state dict under each of its names.
    std::vector<std::string> others;
    for (const auto& names : record.tied())
      others.insert(others.end(), names.begin() + 1, names.end());
    std::vector<std::string> buffers;
    for (const auto& buffer : record.buffers()) buffers.push_back(buffer.name);
    const auto has = [](const std::vector<std::string>& all, const std::string& one) {
      return std::find(all.begin(), all.end(), one) != all.end();
    };
    for (const auto& [key, tensor] : core->strategy->state_dict()) {
      if (has(others, key)) continue;
      if (has(buffers, key) && !is_main_process()) continue;
      values_.note(name + key, tensor);
    }
    for (const auto& shard : core->strategy->shards()) {
      if (shard.placement.count() == 0) {
        values_.note_absent(concat(name, shard.name, " optimizer "));
        continue;
      }
      for (std::size_t o = 0; o < optimizers_.size(); ++o) {
        if (const auto optimizer = optimizers_[o].lock())
          values_.note_state(concat(name, shard.name, " optimizer ", o), optimizer->optimizer(),
                             shard.tensor, shard.placement.first());
      }
    }
  }
}

at::Tensor batch_of(int rank, int step, const std::vector<std::int64_t>& sizes, int micro_batch) {
  torch::manual_seed(1000 * step + 10 * micro_batch + rank);
  return torch::randn(sizes, torch::kDouble);
}

std::string check_message(const std::exception& error, const std::string& part) {
  const std::string message = error.what();
  if (message.find(part) != std::string::npos) return {};
  return concat("its message has no \"", part, "\" in it");
}

std::string name_of_type(const std::type_info& type) { return c10::demangle(type.name()); }

namespace {

// The processes of one launch have one parent.
std::filesystem::path meeting_place() {
  std::ifstream stat(concat("/proc/", getppid(), "/stat"));
  const std::string text{std::istreambuf_iterator<char>(stat), {}};
  std::size_t space = text.rfind(')');
  // The start of the parent, since numbers of processes come again: field 22.
  for (int field = 2; field < 22 && space != std::string::npos; ++field)
    space = text.find(' ', space + 1);
  const std::string start = space == std::string::npos
                                ? ""
                                : text.substr(space + 1, text.find(' ', space + 1) - space - 1);
  return std::filesystem::temp_directory_path() /
         concat("accelerate_programs.", getppid(), ".", start);
}

// One object a process; removed with the last of them.
c10d::FileStore& meeting() {
  static const auto store =
      c10::make_intrusive<c10d::FileStore>(meeting_place().string(), world().size());
  return *store;
}

}  // namespace

std::filesystem::path temporary_folder(const std::string& name) {
  struct Folder {
    std::filesystem::path path = meeting_place().string() + ".folder";
    ~Folder() {
      std::error_code ignored;
      if (std::filesystem::exists(path)) std::filesystem::remove_all(path, ignored);
    }
  };
  static const Folder folder;
  return folder.path / name;
}

std::vector<std::optional<std::string>> tell_all(const std::string& outcome) {
  const int ranks = world().size();
  if (ranks == 1) return {outcome};
  c10d::FileStore& store = meeting();
  static int round = 0;
  ++round;
  const auto key = [&](int rank) { return concat("ended ", round, " ", rank); };
  store.set(key(world().rank()), std::vector<std::uint8_t>(outcome.begin(), outcome.end()));
  const auto until = std::chrono::steady_clock::now() + kPatience;
  std::vector<std::optional<std::string>> all(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    try {
      store.wait({key(rank)}, std::max(left, std::chrono::milliseconds(50)));
      const auto bytes = store.get(key(rank));
      all[static_cast<std::size_t>(rank)] = std::string(bytes.begin(), bytes.end());
    } catch (const std::exception&) {
      // It has not come.
    }
  }
  return all;
}

namespace {

[[noreturn]] void end_run(const std::string& why) {
  std::cerr << concat("[rank ", world().rank(), "] ", why, "\nThe cases after it were not run.\n")
            << std::flush;
  std::_Exit(1);
}

// What went wrong, or nothing; ends the run when the ranks cannot go on together.
std::string how_it_ended(const std::function<void()>& run, const ErrorCheck& raises) {
  std::string outcome;
  bool unexpected = false;
  try {
    run();
    if (raises != nullptr) outcome = "it ended well, and should have raised an error";
  } catch (const accelerate::Error& error) {
    const std::string wrong = raises != nullptr ? raises(error) : "it was not expected";
    if (!wrong.empty()) {
      unexpected = true;
      outcome = concat("it raised ", name_of_type(typeid(error)), ": ", accelerate::describe(error),
                       " (", wrong, ")");
    }
  } catch (const std::exception& error) {
    unexpected = true;
    outcome = concat("it raised ", name_of_type(typeid(error)),
                     ", which is none of ours: ", error.what());
  }
  const auto all = tell_all(outcome);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank]) {
      end_run(concat("Rank ", rank, " has not ended ", kPatience.count(),
                     " s after this one, of which is to say: ",
                     outcome.empty() ? "it ended as it should" : outcome));
    }
  }
  const bool any =
      std::any_of(all.begin(), all.end(), [](const auto& one) { return !one->empty(); });
  if (any && world().size() > 1) {
    if (!outcome.empty())
      std::cerr << concat("[rank ", world().rank(), "] ", outcome, "\n") << std::flush;
    if (unexpected) end_run("An error that was not expected.");
    if (outcome.empty()) end_run("Another rank did not end as it should.");
  }
  return outcome;
}

class Case : public ::testing::Test {
 public:
  Case(std::shared_ptr<Program::Entry> program, StrategyKind strategy)
      : program_(std::move(program)), where_{strategy, data_parallel().size()} {}

  void TestBody() override {
    const ProgramOptions& options = program_->options;
    if (where_.ranks < options.least_ranks || where_.ranks > options.most_ranks ||
        (where_.ranks > 1 && where_.strategy == StrategyKind::single))
      return;
    const bool raises = options.raises != nullptr &&
                        (options.raises_when == nullptr || options.raises_when(where_));
    if (!raises && program_->right == nullptr) {
      const std::string wrong = how_it_ended([&] { run_plain(); }, nullptr);
      ASSERT_EQ(wrong, "") << "the plain program";
    }
    AcceleratorOptions accelerator_options = options.options;
    accelerator_options.strategy(where_.strategy);
    if (where_.cuts()) accelerator_options.fsdp(options.fsdp);
    Sharded accelerator(accelerator_options);
    torch::manual_seed(1);
    const std::string wrong =
        how_it_ended([&] { program_->sharded(accelerator); }, raises ? options.raises : nullptr);
    ASSERT_EQ(wrong, "");
    if (raises) return;
    ASSERT_GT(accelerator.checks(), 0) << "The program never calls accelerator.check().";
    expect_none(accelerator.values().differences(*program_->right, options.tolerance));
  }

 private:
  void run_plain() {
    Plain plain(program_->options.options, data_parallel());
    torch::manual_seed(1);
    program_->plain(plain);
    program_->right = std::make_shared<Values>(plain.values());
  }
  static void expect_none(const std::vector<std::string>& differences) {
    for (const std::string& one : differences) ADD_FAILURE() << one;
  }

  std::shared_ptr<Program::Entry> program_;
  Where where_;
};

}  // namespace

void Program::add(Entry entry) {
  const auto shared = std::make_shared<Entry>(std::move(entry));
  for (const StrategyKind strategy : shared->options.strategies) {
    ::testing::RegisterTest(
        shared->name.c_str(), std::string(accelerate::to_string(strategy)).c_str(), nullptr,
        nullptr, __FILE__, __LINE__,
        [shared, strategy]() -> ::testing::Test* { return new Case(shared, strategy); });
  }
}

}  // namespace programs
