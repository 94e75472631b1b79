// What is decided without a tensor: where parameters lie, and what comes next.

#include <intercept/layout.hpp>
#include <intercept/trace.hpp>

#include <gtest/gtest.h>

#include <random>

namespace accelerate::intercept {
namespace {

void check(const std::vector<Piece>& pieces, int parts, std::int64_t alignment) {
  const Layout layout = lay_out(pieces, parts, alignment);
  ASSERT_EQ(layout.offsets.size(), pieces.size());
  EXPECT_EQ(layout.part % alignment, 0);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_GE(layout.offsets[i], end) << "pieces overlap";
    EXPECT_EQ(layout.offsets[i] % alignment, 0);
    end = layout.offsets[i] + pieces[i].elements;
    if (!layout.row_aligned[i]) continue;
    for (std::int64_t cut = layout.part; cut < layout.total(); cut += layout.part) {
      if (cut <= layout.offsets[i] || cut >= end) continue;
      EXPECT_EQ((cut - layout.offsets[i]) % pieces[i].row, 0);
    }
  }
  EXPECT_LE(end, layout.total());
}

TEST(Layout, CutsBetweenRows) {
  const std::vector<Piece> block = {{512, 1},          {512, 1},         {1536 * 512, 512},
                                    {1536, 1},         {512 * 512, 512}, {2048 * 512, 512},
                                    {512 * 2048, 2048}};
  for (const int parts : {1, 2, 3, 4, 7, 8}) {
    check(block, parts, 16);
    const Layout layout = lay_out(block, parts, 16);
    for (std::size_t i = 0; i < block.size(); ++i)
      EXPECT_TRUE(layout.row_aligned[i]) << "parts " << parts << " piece " << i;
    EXPECT_LT(static_cast<double>(layout.total() - layout.elements),
              0.02 * static_cast<double>(layout.elements))
        << parts;
  }
}

TEST(Layout, OneLongTableIsCutManyTimes) {
  const Layout layout = lay_out({{50257 * 96, 96}, {1024 * 96, 96}, {96, 1}}, 4, 16);
  EXPECT_TRUE(layout.row_aligned[0]);
  EXPECT_EQ(layout.part % 96, 0);
  check({{50257 * 96, 96}, {1024 * 96, 96}, {96, 1}}, 4, 16);
}

TEST(Layout, SizesThatDivideByNothing) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<Piece> pieces;
    const int count = 1 + static_cast<int>(random() % 6);
    for (int i = 0; i < count; ++i) {
      const auto row = static_cast<std::int64_t>(1 + random() % 40);
      pieces.push_back({row * static_cast<std::int64_t>(random() % 30), row});
    }
    check(pieces, 1 + static_cast<int>(random() % 9), 1 << (random() % 6));
  }
}

std::vector<int> ahead(const Trace& trace) {
  std::vector<int> units;
  trace.look_ahead([&](int unit) { return units.push_back(unit), true; });
  return units;
}

void pass(Trace& trace, const std::vector<int>& units) {
  trace.begin();
  for (const int unit : units) trace.visit(unit);
  trace.end();
}

TEST(Trace, RecordsThenFollows) {
  Trace trace;
  trace.begin();
  EXPECT_FALSE(trace.following());
  trace.visit(0);
  EXPECT_TRUE(ahead(trace).empty());
  trace.end();
  pass(trace, {0, 1, 2, 1, 0});
  trace.begin();
  EXPECT_EQ(ahead(trace), (std::vector<int>{0, 1, 2, 1, 0}));
  trace.visit(0);
  trace.visit(1);
  EXPECT_TRUE(trace.following());
  EXPECT_EQ(ahead(trace), (std::vector<int>{2, 1, 0}));
}

TEST(Trace, RecordsAnewWhenTheProgramChangesItsMind) {
  Trace trace;
  pass(trace, {0, 1, 2});
  trace.begin();
  trace.visit(0);
  trace.visit(2);
  EXPECT_FALSE(trace.following());
  EXPECT_TRUE(ahead(trace).empty());
  trace.visit(1);
  EXPECT_EQ(trace.visited(), (std::vector<int>{0, 2, 1}));
  trace.end();
  trace.begin();
  EXPECT_EQ(ahead(trace), (std::vector<int>{0, 2, 1}));
}

TEST(Trace, AShorterOrLongerPassIsAnother) {
  Trace trace;
  pass(trace, {0, 1, 2});
  pass(trace, {0, 1});
  trace.begin();
  EXPECT_EQ(ahead(trace), (std::vector<int>{0, 1}));
  pass(trace, {0, 1, 2, 3});
  trace.begin();
  EXPECT_EQ(ahead(trace), (std::vector<int>{0, 1, 2, 3}));
  pass(trace, {});  // a pass in which nothing happened teaches nothing
  trace.begin();
  EXPECT_EQ(ahead(trace), (std::vector<int>{0, 1, 2, 3}));
}

TEST(Trace, FingerprintTellsOrders) {
  Trace one, other;
  one.begin();
  other.begin();
  for (const int unit : {0, 1, 2}) one.visit(unit);
  for (const int unit : {0, 2, 1}) other.visit(unit);
  EXPECT_NE(one.fingerprint(), other.fingerprint());
}

}  // namespace
}  // namespace accelerate::intercept
