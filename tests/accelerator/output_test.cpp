// What programs write. C++'s global locale writes 1000 as 1.000 here, from before the ranks meet:
// names, files and what is read back are the same as without.
#include <support/distributed.hpp>
#include <support/locales.hpp>

#include <accelerate/accelerate.hpp>

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <filesystem>
#include <set>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using accelerate::testing::world;

const testing::GermanStreams german;

TEST(Locale, CheckpointsAreNumberedAndReadOnBothSidesOfOneThousand) {
  ASSERT_EQ(std::use_facet<std::numpunct<char>>(std::locale()).thousands_sep(), '.');
  std::string name;
  if (world().rank() == 0) name = io::TemporaryFolder(fs::temp_directory_path()).keep().string();
  const fs::path folder = world().broadcast_bytes(name);
  const auto project = [&] {
    return ProjectConfiguration().project_dir(folder).automatic_checkpoint_naming(true).iteration(
        999);
  };
  std::vector<double> losses;
  for (int run = 0; run < 2; ++run) {
    Accelerator accelerator(AcceleratorOptions().cpu(true).project_config(project()));
    set_seed(1);
    torch::nn::Linear net(40, 30);  // 1200 weights
    torch::optim::Adam adam(net->parameters(), 0.0125);
    auto [model, optimizer] = accelerator.prepare(net, adam);
    const auto step = [&, &model = model, &optimizer = optimizer] {
      const at::Tensor loss = model(at::ones({1024, 40})).square().mean();
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      return loss.item<double>();
    };
    if (run == 0) {
      for (int i = 0; i < 3; ++i) {
        step();
        accelerator.save_state();
      }
      losses.push_back(step());
    } else {
      EXPECT_EQ(accelerator.load_state().filename().string(), "checkpoint_1001");
      losses.push_back(step());
      EXPECT_EQ(accelerator.save_state().filename().string(), "checkpoint_1002");
    }
  }
  EXPECT_EQ(losses[0], losses[1]);
  const auto names = io::names_in(folder / "checkpoints");
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()),
            (std::set<std::string>{"checkpoint_999", "checkpoint_1000", "checkpoint_1001",
                                   "checkpoint_1002", "latest"}));
  world().barrier();
  if (world().rank() == 0) fs::remove_all(folder);
}

TEST(Print, ALineDoesNotBeginInTheMiddleOfABar) {
  Accelerator accelerator(AcceleratorOptions().cpu(true));
  if (!accelerator.is_local_main_process()) return;
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  {
    Progress bar(ProgressOptions(4).terminal(true).interval(0.0).enabled(true));
    bar.advance();
    accelerator.print("step ", 1234);
  }
  const std::string out = ::testing::internal::GetCapturedStdout();
  const std::string bars = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(out, "step 1234\n");
  // Written, erased for the line, and written again with the last state.
  const std::string erased = "\r\033[K\r\033[K";
  EXPECT_NE(bars.find("batches/s" + erased + " 25%"), std::string::npos) << bars;
}

}  // namespace
}  // namespace accelerate
