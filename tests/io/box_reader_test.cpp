// Tensors that lie in files as boxes: any layout is read into any other, and no byte too many.

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/box_reader.hpp>
#include <support/message_of.hpp>
#include <support/random_placements.hpp>

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <set>

namespace accelerate::io {
namespace {

namespace fs = std::filesystem;
using testing::for_each_element;
using testing::message_of;
using testing::RandomPlacements;
using Sizes = std::vector<std::int64_t>;
using safetensors::Dtype;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

void write(const fs::path& path, const std::string& contents) {
  File file = File::create(path);
  file.write(contents.data(), contents.size(), 0);
  file.close();
}

std::string signed_text(const Json& body) {
  Json rest = body;
  rest.erase("checksum");
  const std::string text = rest.dump().substr(1) + "\n";
  return "{\"checksum\":\"" + checksum_text(checksum(bytes_of(text))) + "\",\n" + text;
}

SavedFile listed(const std::string& name, const std::string& contents) {
  return {name, contents.size(), block_checksums(bytes_of(contents))};
}

// A tensor whose elements are the numbers of their places in it, saved with this layout.
template <class Element>
SavedTensor save(const fs::path& folder, Manifest& manifest, Dtype dtype, const Sizes& shape,
                 const std::vector<Placement>& ranks, RandomPlacements& random) {
  SavedTensor tensor{dtype, shape, {}, {}};
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    std::string contents(static_cast<std::size_t>(random.below(64)), '?');
    for (const PlacedBox& placed : ranks[rank].boxes()) {
      tensor.boxes.push_back({manifest.files.size(), contents.size(), placed.box});
      for_each_element(shape, placed, [&](std::int64_t element, std::int64_t) {
        const auto value = static_cast<Element>(element);
        contents.append(reinterpret_cast<const char*>(&value), sizeof value);
      });
    }
    const std::string name = text::concat("rank", manifest.files.size());
    write(folder / name, contents);
    manifest.files.push_back(listed(name, contents));
  }
  return tensor;
}

// What a rank must have in memory.
template <class Element>
std::vector<Element> expected_of(const Placement& rank) {
  std::vector<Element> memory(static_cast<std::size_t>(rank.count()));
  for (const PlacedBox& placed : rank.boxes()) {
    for_each_element(rank.shape(), placed, [&](std::int64_t element, std::int64_t place) {
      memory[static_cast<std::size_t>(place)] = static_cast<Element>(element);
    });
  }
  return memory;
}

template <class Element>
void expect_any_layout_loads_into_any_other(Dtype dtype, std::uint64_t seed) {
  RandomPlacements random(seed);
  const TemporaryFolder folder;
  Manifest written;
  const Sizes shape = random.shape();
  written.groups["model"]["w"] =
      save<Element>(folder.path(), written, dtype, shape, random.layout(shape), random);
  write(folder.path() / Manifest::kFileName, written.text());
  const Manifest manifest = Manifest::read(folder.path());
  manifest.check_files(folder.path());
  const SavedTensor& tensor = *manifest.find("model", "w");
  for (const Placement& rank : random.layout(shape)) {
    const auto wanted = rank.boxes();
    const auto expected = expected_of<Element>(rank);
    BoxReader reader(folder.path(), manifest);
    // Bytes around it stay as they are.
    std::vector<Element> memory(expected.size() + 2, static_cast<Element>(77));
    reader.read(tensor, wanted, reinterpret_cast<std::byte*>(memory.data() + 1));
    ASSERT_EQ(memory.front(), static_cast<Element>(77)) << "seed " << seed;
    ASSERT_EQ(memory.back(), static_cast<Element>(77)) << "seed " << seed;
    ASSERT_EQ(std::memcmp(memory.data() + 1, expected.data(), expected.size() * sizeof(Element)), 0)
        << "seed " << seed << ", " << rank.text();
    // Each wanted byte comes once, also when a file is gone through in stretches.
    std::uint64_t bytes = 0;
    std::set<std::int64_t> places;
    for (const Overlap& overlap : Overlap::of(tensor, wanted)) {
      std::uint64_t next = overlap.begin();
      ASSERT_EQ(overlap.next(0), overlap.begin());
      for (std::uint64_t from = 0; from < overlap.end();) {
        const auto to = from + 1 + static_cast<std::uint64_t>(random.below(40));
        ASSERT_GE(overlap.next(from), from);
        overlap.for_each_run(from, to, [&](std::uint64_t at, std::uint64_t size, std::int64_t to_) {
          ASSERT_EQ(overlap.next(next), at) << "seed " << seed;
          next = at + size;
          bytes += size;
          for (std::uint64_t i = 0; i < size; ++i)
            ASSERT_TRUE(places.insert(to_ + static_cast<std::int64_t>(i)).second);
        });
        from = to;
      }
      ASSERT_EQ(next, overlap.end()) << "seed " << seed;
    }
    ASSERT_EQ(bytes, expected.size() * sizeof(Element)) << "seed " << seed;
  }
}

TEST(BoxReader, AnyLayoutLoadsIntoAnyOther) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    expect_any_layout_loads_into_any_other<float>(Dtype::kF32, seed);
    expect_any_layout_loads_into_any_other<std::uint8_t>(Dtype::kU8, 1000 + seed);
    expect_any_layout_loads_into_any_other<std::int64_t>(Dtype::kI64, 2000 + seed);
  }
}

TEST(BoxReader, ReadsTheBytesThatAreWantedAndNoOthers) {
  const TemporaryFolder folder;
  Manifest manifest;
  RandomPlacements random(1);
  const Sizes shape{24, 4096};
  // Rows over 3 ranks.
  std::vector<Placement> rows, columns;
  for (std::int64_t part = 0; part < 3; ++part)
    rows.push_back(Placement(shape).cut({"tp", 0, 3, part}));
  for (std::int64_t part = 0; part < 2; ++part)
    columns.push_back(Placement(shape).cut({"tp", 1, 2, part}));
  const SavedTensor tensor = save<float>(folder.path(), manifest, Dtype::kF32, shape, rows, random);
  const auto read = [&](const Placement& rank) {
    BoxReader reader(folder.path(), manifest);
    std::vector<float> memory(static_cast<std::size_t>(rank.count()));
    reader.read(tensor, rank.boxes(), reinterpret_cast<std::byte*>(memory.data()));
    EXPECT_EQ(memory, expected_of<float>(rank));
    return reader.bytes_read();
  };
  for (const Placement& rank : rows) EXPECT_EQ(read(rank), 8 * 4096 * sizeof(float));
  // Half of each row, from each file.
  for (const Placement& rank : columns) EXPECT_EQ(read(rank), 24 * 2048 * sizeof(float));
  // Within three blocks of each row, and then a run of that: rows of 1200 bytes and more apart.
  const Placement heads = Placement({24, 4096}).cut({"tp", 1, 3, 1, 2});
  EXPECT_EQ(read(heads.run(5, 1000)), 1000 * sizeof(float));
  // Columns of 16 bytes: a page has many of them, and is read once.
  const Placement thin = Placement(shape).cut({"tp", 1, 1024, 7});
  EXPECT_EQ(read(thin), 24 * 4 * sizeof(float));  // rows lie further apart than a page
  const Sizes narrow{6000, 8};
  const SavedTensor near =
      save<float>(folder.path(), manifest, Dtype::kF32, narrow, {Placement(narrow)}, random);
  BoxReader reader(folder.path(), manifest);
  const Placement half = Placement(narrow).cut({"tp", 1, 2, 0});
  std::vector<float> memory(static_cast<std::size_t>(half.count()));
  reader.read(near, half.boxes(), reinterpret_cast<std::byte*>(memory.data()));
  EXPECT_EQ(memory, expected_of<float>(half));
  EXPECT_LE(reader.bytes_read(), 6000 * 8 * sizeof(float));
  // Nothing of a page without wanted bytes.
  const Placement ends = Placement({3, 2048}).cut({"tp", 1, 256, 0});
  const SavedTensor apart =
      save<float>(folder.path(), manifest, Dtype::kF32, {3, 2048}, {Placement({3, 2048})}, random);
  BoxReader other(folder.path(), manifest);
  memory.resize(static_cast<std::size_t>(ends.count()));
  other.read(apart, ends.boxes(), reinterpret_cast<std::byte*>(memory.data()));
  EXPECT_EQ(memory, expected_of<float>(ends));
  EXPECT_EQ(other.bytes_read(), 3 * 8 * sizeof(float));
}

TEST(BoxReader, RunsOfVersionOneAreBoxes) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    RandomPlacements random(seed);
    const TemporaryFolder folder;
    const Sizes shape = random.shape();
    std::vector<Placement> ranks;
    do ranks = random.layout(shape);
    while (!ranks[0].cuts().empty());
    // Each run as it lies in its rank's memory, as version 1 wrote it.
    std::string contents;
    Json pieces = Json::array();
    for (const Placement& rank : ranks) {
      pieces.push_back(Json::array({0, rank.first(), rank.count(), contents.size()}));
      for (const float value : expected_of<float>(rank))
        contents.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    write(folder.path() / "all", contents);
    Manifest plain;
    plain.files = {listed("all", contents)};
    Json body = Json::parse(plain.text());
    body["version"] = 1;
    Json& entry = body["groups"]["model"]["w"];
    entry = {{"dtype", "F32"}, {"shape", shape}};
    if (!ranks[0].order().empty()) entry["order"] = ranks[0].order();
    entry["pieces"] = pieces;
    const Manifest manifest = Manifest::parse(signed_text(body), "manifest.json");
    for (const Placement& rank : random.layout(shape)) {
      BoxReader reader(folder.path(), manifest);
      std::vector<float> memory(static_cast<std::size_t>(rank.count()));
      reader.read(*manifest.find("model", "w"), rank.boxes(),
                  reinterpret_cast<std::byte*>(memory.data()));
      ASSERT_EQ(memory, expected_of<float>(rank)) << "seed " << seed;
    }
  }
}

// ------------------------------------------------------------------------- what is refused

Json manifest_of(int version) {
  Manifest manifest;
  manifest.files = {{"data", 96, {1}}};
  Json body = Json::parse(manifest.text());
  body["version"] = version;
  Json& entry = body["groups"]["model"]["w"];
  entry = {{"dtype", "F32"}, {"shape", Json::array({6, 4})}};
  if (version == 1) {
    entry["order"] = Json::array({1, 0});
    entry["pieces"] = Json::parse("[[0, 0, 10, 0], [0, 10, 14, 40]]");
  } else {
    entry["boxes"] = Json::parse("[[0, 0, [0, 0], [2, 4]], [0, 32, [2, 0], [4, 4]]]");
  }
  return body;
}

TEST(Manifest, SaysWhatIsWrongWithBoxes) {
  EXPECT_NO_THROW(Manifest::parse(signed_text(manifest_of(2)), "manifest.json"));
  // Where the first of two boxes, of rows 0 and 1, should be; or both.
  const std::vector<std::pair<std::string, const char*>> wrong{
      {"[0, 0, [-1, 0], [2, 4]], [0, 32, [2, 0], [4, 4]]", "does not lie in a tensor"},
      {"[0, 0, [0, 0], [-2, -4]], [0, 32, [2, 0], [4, 4]]", "does not lie in a tensor"},
      {"[0, 0, [9223372036854775807, 0], [2, 4]], [0, 32, [2, 0], [4, 4]]", "too large"},
      {"[0, 0, [4611686018427387904, 0], [2, 4]], [0, 32, [2, 0], [4, 4]]", "does not lie in"},
      {"[0, 0, [0, 0], [4611686018427387904, 4]], [0, 32, [2, 0], [4, 4]]", "does not lie in"},
      {"[0, 0, [0, 0], [2, 4]], [0, 32, [1, 0], [4, 4]]", "[0:2, 0:4] and [1:5, 0:4] overlap"},
      {"[0, 0, [0, 0], [2, 4]], [0, 32, [0, 0], [6, 4]]", "more than the 24"},
      {"[0, 0, [0, 0], [2, 4]], [0, 32, [2, 0], [3, 4]]", "20 of the 24"},
      {"[0, 0, [0, 0], [2, 4]]", "8 of the 24"},
      {"", "0 of the 24"},
      {"[0, 0, [0], [6]]", "does not lie in a tensor"},
      {"[0, 0, [0, 0, 0], [6, 4, 1]]", "does not lie in a tensor"},
      {"[0, 4, [0, 0], [6, 4]]", "outside of its file"},
      {"[0, -8, [0, 0], [6, 4]]", "no negative number"},
      {"[0, 4611686018427387904, [0, 0], [6, 4]]", "outside of its file"},
      {"[1, 0, [0, 0], [6, 4]]", "outside of its file"},
      {"[0, 0, [0, 0.5], [6, 4]]", "whole number"},
      {"[0, 0, [0, 1e300], [6, 4]]", "whole number"},
      {"[0, 0, [0, 0]]", "a box belongs"},
      {"[0, 0, 0, [6, 4]]", "list of numbers"},
      {"\"text\"", "a box belongs"},
  };
  for (const auto& [boxes, part] : wrong) {
    Json body = manifest_of(2);
    body["groups"]["model"]["w"]["boxes"] = Json::parse("[" + boxes + "]");
    const auto message =
        message_of<CheckpointError>([&] { Manifest::parse(signed_text(body), "manifest.json"); });
    EXPECT_NE(message.find(part), std::string::npos) << boxes << ": " << message;
    EXPECT_EQ(message.find("manifest.json"), 0U) << message;
  }
}

TEST(Manifest, VersionOneIsReadAndLaterOnesAreNot) {
  const Manifest manifest = Manifest::parse(signed_text(manifest_of(1)), "manifest.json");
  EXPECT_EQ(manifest.find("model", "w")->boxes.size(), 4U);
  EXPECT_THROW(static_cast<void>(manifest.text()), StateError);
  for (const char* piece :
       {"[0, -1, 10, 0]", "[0, 20, 10, 0]", "[0, 0, -10, 0]", "[0, 11, 2305843009213693952, 0]",
        "[0, 1, 10, 0]", "[0, 0, 10, 90]", "[2, 0, 10, 0]", "[0, 0, 10]", "7"}) {
    Json body = manifest_of(1);
    body["groups"]["model"]["w"]["pieces"][0] = Json::parse(piece);
    EXPECT_THROW(Manifest::parse(signed_text(body), "manifest.json"), CheckpointError) << piece;
  }
  for (const char* order : {"[0, 0]", "[1]", "[1, 2]", "[-1, 0]", "\"text\""}) {
    Json body = manifest_of(1);
    body["groups"]["model"]["w"]["order"] = Json::parse(order);
    EXPECT_THROW(Manifest::parse(signed_text(body), "manifest.json"), CheckpointError) << order;
  }
  Json body = manifest_of(2);
  body["version"] = 3;
  const auto message =
      message_of<CheckpointError>([&] { Manifest::parse(signed_text(body), "manifest.json"); });
  EXPECT_NE(message.find("has version 3, and this library reads 1 to 2"), std::string::npos)
      << message;
}

void collect(Json& json, std::vector<Json*>& found) {
  found.push_back(&json);
  if (!json.is_structured()) return;
  for (Json& item : json) collect(item, found);
}

// Whatever its numbers become, a list is taken or refused, and what is taken has every element in
// one place.
TEST(Manifest, MutantsAreReadOrRefused) {
  int refused = 0, read = 0;
  for (const int version : {1, 2}) {
    for (std::uint64_t seed = 0; seed < 1500; ++seed) {
      RandomPlacements random(seed);
      Json body = manifest_of(version);
      for (std::int64_t changes = 1 + random.below(2); changes > 0; --changes) {
        std::vector<Json*> all;
        collect(body["groups"], all);
        Json& value = *all[static_cast<std::size_t>(random.below(std::ssize(all)))];
        const std::vector<Json> others{Json(),
                                       -1,
                                       0,
                                       1,
                                       7,
                                       (std::int64_t{1} << 62) - 1,
                                       std::numeric_limits<std::int64_t>::min(),
                                       std::numeric_limits<std::uint64_t>::max(),
                                       0.5,
                                       1e300,
                                       "F4",
                                       "F64",
                                       Json::array(),
                                       Json::array({0, 0}),
                                       Json::object()};
        if (value.is_number_integer() && random.below(3) == 0) {
          value = value.get<std::int64_t>() + (random.below(2) == 0 ? 1 : -1);
        } else {
          value = others[static_cast<std::size_t>(random.below(std::ssize(others)))];
        }
      }
      try {
        const Manifest manifest = Manifest::parse(signed_text(body), "manifest.json");
        ++read;
        for (const auto& [group, tensors] : manifest.groups) {
          for (const auto& [name, tensor] : tensors) {
            std::int64_t elements = 0;
            for (const SavedBox& own : tensor.boxes) elements += own.box.elements();
            ASSERT_EQ(elements, tensor.elements()) << body;
          }
        }
      } catch (const CheckpointError&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 1500);
  EXPECT_GT(read, 50);
}

}  // namespace
}  // namespace accelerate::io
