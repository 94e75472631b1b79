#include <accelerate/base/log.hpp>
#include <accelerate/base/progress.hpp>
#include <accelerate/base/text.hpp>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <sstream>
#include <thread>

namespace accelerate {
namespace {

std::vector<std::string> lines(const std::ostringstream& out) {
  auto all = text::split(out.str(), '\n');
  EXPECT_EQ(all.back(), "");
  all.pop_back();
  return all;
}

TEST(Progress, WritesWholeLinesWhereThereIsNoTerminal) {
  std::ostringstream out;
  {
    Progress bar(
        ProgressOptions(4).output(&out).interval(0.0).description("epoch 1").unit("steps"));
    for (int step = 1; step <= 4; ++step) {
      bar.text(text::concat("loss ", step));
      bar.advance();
    }
  }
  const auto written = lines(out);
  ASSERT_EQ(written.size(), 5u);
  EXPECT_EQ(written[0].find("epoch 1  25% 1/4 steps, "), 0u) << written[0];
  EXPECT_NE(written[0].find(" left, "), std::string::npos) << written[0];
  EXPECT_NE(written[0].find("steps/s, loss 1"), std::string::npos) << written[0];
  EXPECT_EQ(written[4].find("epoch 1 100% 4/4 steps, "), 0u) << written[4];
  EXPECT_EQ(written[4].find(" left"), std::string::npos) << written[4];
  EXPECT_EQ(out.str().find('\r'), std::string::npos);
}

TEST(Progress, RewritesOneLineOnATerminal) {
  std::ostringstream out;
  {
    Progress bar(ProgressOptions(2).output(&out).interval(0.0).terminal(true));
    bar.advance();
    bar.advance();
  }
  EXPECT_EQ(lines(out).size(), 1u);
  EXPECT_EQ(out.str().find("\r\033[K 50% [####"), 0u) << out.str();
  EXPECT_NE(out.str().find("\r\033[K100% [####"), std::string::npos) << out.str();
}

TEST(Progress, CountsWhenTheTotalIsUnknown) {
  std::ostringstream out;
  {
    Progress bar(ProgressOptions().output(&out));
    bar.set(7);
    EXPECT_EQ(bar.done(), 7);
  }
  EXPECT_EQ(out.str().find("7 batches, "), 0u) << out.str();
  EXPECT_EQ(out.str().find('%'), std::string::npos) << out.str();
}

TEST(Progress, WritesNoOftenerThanItsInterval) {
  std::ostringstream out;
  {
    Progress bar(ProgressOptions(1000).output(&out).interval(0.05));
    for (int step = 0; step < 100; ++step) {
      bar.advance();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  EXPECT_GE(lines(out).size(), 2u);
  EXPECT_LE(lines(out).size(), 20u);
}

TEST(Progress, WritesBytesWithTheirUnits) {
  std::ostringstream out;
  {
    Progress bar(ProgressOptions(std::int64_t{3} << 20).output(&out).interval(0.0).unit("bytes"));
    bar.set(std::int64_t{3} << 19);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    bar.set(std::int64_t{3} << 20);
  }
  const auto written = lines(out);
  ASSERT_EQ(written.size(), 3u);
  EXPECT_EQ(written[0].find(" 50% 1.50 MiB/3.00 MiB, "), 0u) << written[0];
  EXPECT_EQ(written[2].find("100% 3.00 MiB/3.00 MiB, "), 0u) << written[2];
  EXPECT_TRUE(written[2].ends_with(" MiB/s")) << written[2];
}

TEST(Progress, SaysNothingOfWhatIsDoneBeforeTheDelay) {
  std::ostringstream out;
  Progress(ProgressOptions(1).output(&out).delay(60.0)).advance();
  EXPECT_EQ(out.str(), "");
  {
    Progress bar(ProgressOptions(2).output(&out).interval(0.0).delay(0.03));
    bar.advance();
    EXPECT_EQ(out.str(), "");
    std::this_thread::sleep_for(std::chrono::milliseconds(40));
    bar.advance();
  }
  EXPECT_EQ(lines(out).size(), 2u) << out.str();
}

TEST(Progress, ASignalThatEndsTheProcessLeavesTheCursorOnANewLine) {
  for (const int number : {SIGINT, SIGTERM}) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(ends[1], STDERR_FILENO);
      ::close(ends[1]);
      ::signal(number, SIG_DFL);
      Progress bar(ProgressOptions(4).terminal(true).interval(0.0).enabled(true));
      bar.advance();
      ::raise(number);
      ::_exit(0);
    }
    ::close(ends[1]);
    std::string written;
    char buffer[512];
    for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;)
      written.append(buffer, static_cast<std::size_t>(n));
    ::close(ends[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == number) << status;
    EXPECT_TRUE(written.ends_with("batches/s\n")) << written;
  }
}

TEST(Progress, IsSilentOffTheMainProcessUnlessTold) {
  std::ostringstream out;
  log::set_process(1, 2, 1);
  Progress(ProgressOptions(1).output(&out)).advance();
  EXPECT_EQ(out.str(), "");
  Progress(ProgressOptions(1).output(&out).enabled(true)).advance();
  EXPECT_NE(out.str(), "");
  log::set_process(0, 1, 0);
}

TEST(Progress, EndsOnceAndSurvivesEmptyTotals) {
  std::ostringstream out;
  Progress bar(ProgressOptions(0).output(&out));
  bar.close();
  bar.close();
  bar.advance();
  EXPECT_EQ(lines(out).size(), 1u);
  EXPECT_EQ(out.str().find("100% 0/0"), 0u) << out.str();
}

}  // namespace
}  // namespace accelerate
