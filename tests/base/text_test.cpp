// Text: the same in every locale, and harmless to terminals.
#include <accelerate/base/error.hpp>
#include <accelerate/base/progress.hpp>
#include <accelerate/base/text.hpp>

#include <gtest/gtest.h>

#include <cstdio>
#include <optional>
#include <sstream>

#include "base/parse_json.hpp"
#include "base/plain_text.hpp"
#include "support/locales.hpp"

namespace accelerate {
namespace {

void expect_plain_numbers() {
  EXPECT_EQ(text::concat("checkpoint_", 1000, ' ', 1234567.5, ' ', -0.5),
            "checkpoint_1000 1.23457e+06 -0.5");
  EXPECT_EQ(text::join(std::vector<int>{1000, 20000}), "1000, 20000");
  EXPECT_EQ(text::fixed(1234.5, 2), "1234.50");
  EXPECT_EQ(text::fixed(99.6, 0), "100");
  EXPECT_EQ(text::format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(text::format_bytes(1023), "1023 B");
  EXPECT_EQ(text::format_seconds(0.3402), "340 ms");
  EXPECT_EQ(text::format_seconds(2.54), "2.5 s");
  EXPECT_EQ(text::format_seconds(61), "1:01");
  EXPECT_EQ(text::format_seconds(3723), "1:02:03");
  EXPECT_EQ(text::to_double("0.5"), 0.5);
  EXPECT_EQ(text::to_double("0,5"), std::nullopt);
  EXPECT_EQ(text::to_int("1.000"), std::nullopt);
  EXPECT_EQ(text::to_bytes("1.5KiB"), 1536);
  EXPECT_EQ(parse_json("[0.5, 1e-3]").dump(), "[0.5,0.001]");
  EXPECT_EQ(parse_json("[0.5]")[0].get<double>(), 0.5);
  std::ostringstream out;
  Progress(ProgressOptions(2000).output(&out).unit("bytes")).set(1000);
  EXPECT_NE(out.str().find(" 50% 1000 B/1.95 KiB"), std::string::npos) << out.str();
}

TEST(Text, NumbersDoNotFollowTheLocaleOfStreams) {
  const testing::GermanStreams german;
  std::ostringstream follows;
  follows << 1000 << ' ' << 0.5;
  ASSERT_EQ(follows.str(), "1.000 0,5");
  expect_plain_numbers();
}

TEST(Text, NumbersDoNotFollowTheLocaleOfC) {
  const testing::GermanC german;
  if (!german.found()) GTEST_SKIP() << "localedef is not there";
  char follows[16];
  std::snprintf(follows, sizeof follows, "%.1f", 0.5);
  ASSERT_STREQ(follows, "0,5");
  expect_plain_numbers();
}

TEST(Text, LettersAndSpacesAreThoseOfAscii) {
  EXPECT_EQ(text::to_lower("MPI\xc4"), "mpi\xc4");
  EXPECT_EQ(text::trim(" \t\n\v\f\r x\xa0 "), "x\xa0");
}

TEST(Text, ControlCharactersDoNotReachTheTerminal) {
  EXPECT_EQ(text::printable("a\x1b[2J\rb\x7f\x07\n\tc"), "a\\x1b[2J\\x0db\\x7f\\x07\n\tc");
  EXPECT_EQ(text::printable("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(text::printable("\xc2\x9b"
                            "31m"),
            "\\x9b31m");  // the eight-bit form of escape and [
  EXPECT_EQ(text::printable("\xc2"), "\xc2");
  EXPECT_STREQ(Error("the tensor '\x1b]0;owned\x07' is missing").what(),
               "the tensor '\\x1b]0;owned\\x07' is missing");
  EXPECT_STREQ(CheckpointError("\x1b[2J", "file").what(), "\\x1b[2J");
  EXPECT_EQ(describe(std::runtime_error("\x1b[2J")), "\\x1b[2J");
}

}  // namespace
}  // namespace accelerate
