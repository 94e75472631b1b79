#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/run.hpp>

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace accelerate {
namespace {

TEST(Run, AnErrorIsOneLineAndAnExitCode) {
  const auto ends = [](auto&& program, int code) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(run(program), code);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(ends([] {}, 0), "");
  EXPECT_EQ(ends([] { return 3; }, 3), "");
  EXPECT_EQ(ends([] { throw DataError("Sample 7 is damaged."); }, 1),
            "The program ends with an error: Sample 7 is damaged.\n");
  EXPECT_EQ(ends([]() -> int { throw LaunchError("It did not start.", 127); }, 127),
            "The program ends with an error: It did not start.\n");
  EXPECT_EQ(ends([] { throw std::runtime_error("a\nException raised from b\nframe #0"); }, 1),
            "The program ends with an error: a\n");
  EXPECT_EQ(ends([] { throw 7; }, 1),
            "The program ends with an error: something was thrown that is not a std::exception.\n");
  log::set_process(2, 4, 0);
  EXPECT_EQ(ends([] { throw DataError("Lost."); }, 1),
            "[rank 2] The program ends with an error: Lost.\n");
  log::set_process(0, 1, 0);
}

}  // namespace
}  // namespace accelerate
