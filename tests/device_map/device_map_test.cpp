// Sizes and device maps, compared entry for entry with what Python Accelerate makes of the same
// trees.

#include <support/python.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/device_map/solver.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <set>

namespace accelerate {
namespace {

ModelTree tree_of(const Json& entries) {
  ModelTree tree;
  for (const Json& entry : entries) {
    const std::string kind = entry[0], name = entry[1];
    if (kind == "module") {
      tree.add_module(name, entry[2]);
    } else {
      const auto shape = entry[2].get<std::vector<std::int64_t>>();
      const ElementType type = ElementType::of(entry[3].get<std::string>());
      const std::string same_as = entry[4];
      if (kind == "parameter") {
        tree.add_parameter(name, shape, type, same_as);
      } else {
        tree.add_buffer(name, shape, type, same_as);
      }
    }
  }
  return tree;
}

MaxMemory limits_of(const Json& pairs) {
  MaxMemory limits;
  for (const Json& pair : pairs) {
    limits.emplace_back(Place::of(pair[0].get<std::string>()),
                        static_cast<std::int64_t>(pair[1].get<double>()));
  }
  return limits;
}

std::map<std::string, std::string> as_map(const DeviceMap& map) {
  std::map<std::string, std::string> result;
  for (const auto& [key, place] : map)
    EXPECT_TRUE(result.emplace(key, place.text()).second) << key << " is there twice";
  return result;
}

std::map<std::string, std::string> expected_map(const Json& pairs) {
  std::map<std::string, std::string> result;
  for (const Json& pair : pairs)
    result[pair[0]] = pair[1].is_string() ? pair[1].get<std::string>() : pair[1].dump();
  return result;
}

DeviceMapOptions options_of(const Json& run) {
  DeviceMapOptions options;
  options.no_split_module_classes(run["no_split"].get<std::vector<std::string>>());
  options.clean_result(run["clean"]).fallback_allocation(run["fallback"]);
  SizeOptions sizes;
  if (run["dtype"].is_string()) sizes.dtype(ElementType::of(run["dtype"].get<std::string>()));
  SpecialDtypes special;
  for (const auto& [name, type] : run["special"].items())
    special.emplace_back(name, ElementType::of(type.get<std::string>()));
  options.offload_buffers(run["offload_buffers"]);
  return options.sizes(sizes.special_dtypes(special));
}

void expect_sizes(const SizeTable& actual, const Json& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].first, expected[i][0].get<std::string>());
    EXPECT_EQ(actual[i].second, expected[i][1].get<std::int64_t>()) << actual[i].first;
  }
}

// No place above its limit, counting each tensor once where its first name is.
void expect_within_limits(const ModelTree& tree, const DeviceMap& map, const MaxMemory& limits,
                          const SizeOptions& sizes) {
  std::map<std::string, std::int64_t> used;
  const SizeTable table = compute_module_sizes(tree, sizes);
  for (const auto& [name, bytes] : table) {
    if (tree.find_tensor(name) >= 0) used[place_of(map, name)->text()] += bytes;
  }
  for (const auto& [place, limit] : limits) EXPECT_LE(used[place.text()], limit) << "on " << place;
}

TEST(DeviceMap, EqualsPythonsEntryForEntry) {
  if (!testing::has_python()) GTEST_SKIP() << "There is no Python with torch and accelerate.";
  log::set_level(log::Level::warning);
  const bool full = std::getenv("ACCELERATE_TEST_FULL") != nullptr;
  const Json cases = testing::run_python("device_map/reference.py", full ? "6000 7" : "300 1");
  int maps = 0, mended = 0, warnings = 0;
  for (std::size_t c = 0; c < cases.size(); ++c) {
    const Json& entry = cases[c];
    SCOPED_TRACE(::testing::Message() << "tree " << c);
    const ModelTree tree = tree_of(entry["tree"]);
    expect_sizes(compute_module_sizes(tree), entry["sizes"]);
    expect_sizes(compute_module_sizes(tree, SizeOptions().dtype(ElementType::of("float16"))),
                 entry["half"]);
    expect_sizes(compute_module_sizes(tree, {}, /*buffers_only=*/true), entry["buffers"]);
    auto tied = find_tied_parameters(tree);
    std::sort(tied.begin(), tied.end());
    EXPECT_EQ(tied, entry["tied"].get<std::vector<std::vector<std::string>>>());
    const MaximumSizes maximum = calculate_maximum_sizes(tree);
    EXPECT_EQ(maximum.total, entry["maximum"][0].get<std::int64_t>());
    EXPECT_EQ(maximum.largest_layer, entry["maximum"][1].get<std::int64_t>());
    EXPECT_EQ(maximum.largest_layers, entry["maximum"][2].get<std::vector<std::string>>());
    for (std::size_t r = 0; r < entry["runs"].size(); ++r) {
      const Json& run = entry["runs"][r];
      SCOPED_TRACE(::testing::Message() << "run " << r << " " << run.dump());
      const DeviceMapOptions options = options_of(run);
      MaxMemory limits = limits_of(run["max_memory"]);
      if (run["balanced"].is_boolean()) {
        limits = get_balanced_memory(tree, limits, options, run["balanced"].get<bool>());
        if (run.contains("limits")) {
          EXPECT_EQ(limits, get_max_memory(limits_of(run["limits"])));
        }
      }
      ::testing::internal::CaptureStderr();
      const DeviceMap map = infer_auto_device_map(tree, limits, options);
      const std::string said = ::testing::internal::GetCapturedStderr();
      check_device_map(tree, map);
      if (run.contains("error")) {
        // A tied tensor that is itself in the queue, or placed already: the original indexes past
        // the end of a list. There is a map all the same.
        EXPECT_TRUE(run["error"].get<std::string>().starts_with("IndexError")) << run["error"];
        expect_within_limits(tree, map, limits, options.sizes());
        ++mended;
      } else {
        EXPECT_EQ(as_map(map), expected_map(run["map"]));
        const bool warned = said.find("offload_buffers") != std::string::npos;
        // Of modules that are placed with those they share a weight with the original forgets the
        // buffers.
        if (entry["tied"].empty()) {
          EXPECT_EQ(warned, run["warns"].get<bool>()) << said;
          warnings += warned;
        }
        ++maps;
      }
      if (::testing::Test::HasFailure()) return;  // one tree says enough
    }
  }
  EXPECT_GT(maps, 1200);
  EXPECT_GT(warnings, 50);
  EXPECT_LT(mended, maps / 5);
}

TEST(DeviceMap, TenThousandModulesTakeUnder50MillisecondsAndATwentiethOfPythons) {
  if (!testing::has_python()) GTEST_SKIP() << "There is no Python with torch and accelerate.";
  const Json python = testing::run_python("device_map/reference.py", "--time 10000");
  ASSERT_GT(python["modules"].get<int>(), 9900);
  const ModelTree tree = tree_of(python["tree"]);
  const MaxMemory limits = limits_of(python["max_memory"]);
  DeviceMapOptions options;
  options.no_split_module_classes({"Block"});
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const DeviceMap map = infer_auto_device_map(tree, limits, options);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count());
    EXPECT_GT(map.size(), 1000u);
  }
  RecordProperty("milliseconds", std::to_string(best * 1e3));
  std::cout << best * 1e3 << " ms, Python " << python["seconds"].get<double>() * 1e3 << " ms\n";
  EXPECT_LT(best, 0.05);
  EXPECT_GT(python["seconds"].get<double>() / best, 20);
}

ElementType f32() { return ElementType::of("float32"); }

// Two linear layers of 400 bytes, and a module between that has a buffer of its own and a child.
ModelTree small_tree() {
  ModelTree tree("Net");
  tree.add_parameter("first.weight", {10, 10}, f32());
  tree.add_module("middle", "Middle");
  tree.add_parameter("middle.inner.weight", {10, 10}, f32());
  tree.add_buffer("middle.table", {25}, f32());
  tree.add_parameter("last.weight", {10, 10}, f32());
  return tree;
}

TEST(DeviceMap, BuffersBesideChildrenAreNotForgotten) {
  const ModelTree tree = small_tree();
  const DeviceMap map = infer_auto_device_map(
      tree, {{Place::accelerator(0), 1250}, {Place::cpu(), 100000}}, DeviceMapOptions());
  check_device_map(tree, map);
  EXPECT_EQ(as_map(map),
            (std::map<std::string, std::string>{
                {"first", "0"}, {"middle.inner", "0"}, {"middle.table", "cpu"}, {"last", "cpu"}}));
}

TEST(DeviceMap, NamesThatContainOthersAreNotTakenForThem) {
  ModelTree tree;
  tree.add_parameter("1.weight", {4}, f32());
  tree.add_parameter("11.weight", {10}, f32());
  tree.add_parameter("21.weight", {10}, f32(), "11.weight");
  tree.add_parameter("31.weight", {10}, f32());
  const DeviceMap map =
      infer_auto_device_map(tree, {{Place::accelerator(0), 60}, {Place::cpu(), 1000}});
  EXPECT_EQ(as_map(map), (std::map<std::string, std::string>{
                             {"1", "0"}, {"11", "cpu"}, {"21", "cpu"}, {"31", "cpu"}}));
}

TEST(DeviceMap, ABooleanIsAByte) {
  ModelTree tree;
  tree.add_buffer("mask", {3, 5}, ElementType::of("torch.bool"));
  EXPECT_EQ(compute_module_sizes(tree).front().second, 15);
}

TEST(DeviceMap, ADiskThatIsTooSmallIsSaidWithTheFigures) {
  try {
    infer_auto_device_map(small_tree(), {{Place::cpu(), 900}, {Place::disk(), 500}});
    FAIL() << "nothing was said";
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("500"), std::string::npos) << message;
    EXPECT_NE(message.find("1.27 KiB"), std::string::npos) << message;
  }
}

TEST(DeviceMap, MapsByNameAndByHand) {
  const ModelTree tree = small_tree();
  const MaxMemory limits{{Place::accelerator(0), 5000}, {Place::accelerator(1), 5000}};
  EXPECT_EQ(as_map(named_device_map("sequential", tree, limits)),
            (std::map<std::string, std::string>{{"", "0"}}));
  EXPECT_EQ(as_map(named_device_map("auto", tree, limits)),
            as_map(named_device_map("balanced", tree, limits)));
  EXPECT_NE(as_map(named_device_map("balanced_low_0", tree, limits)),
            as_map(named_device_map("balanced", tree, limits)));
  EXPECT_THROW(named_device_map("best", tree, limits), ConfigError);

  const DeviceMap map = parse_device_map(R"({"first": 0, "middle": "cuda:1", "last": "disk"})");
  check_device_map(tree, map);
  EXPECT_EQ(place_of(map, "middle.inner.weight"), Place::accelerator(1));
  EXPECT_EQ(place_of(map, "first.weight"), Place::accelerator(0));
  EXPECT_EQ(place_of(map, "firstborn"), std::nullopt);
  EXPECT_EQ(parse_device_map(to_json(map)), map);
}

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return describe(error);
  }
  return "nothing was refused";
}

TEST(DeviceMap, WhatIsWrongIsNamed) {
  const ModelTree tree = small_tree();
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
  };
  contains(refusal([&] {
             check_device_map(tree, {{"first", Place::cpu()}});
           }),
           "middle.inner.weight, middle.table, last.weight");
  contains(refusal([&] {
             check_device_map(tree, {{"", Place::cpu()}, {"frist", Place::cpu()}});
           }),
           "frist");
  contains(refusal([] { parse_device_map(R"({"a": "gpu"})"); }), "'gpu'");
  contains(refusal([] { parse_device_map(R"({"a": -1})"); }), "'-1'");
  contains(refusal([] { parse_device_map(R"({"a": 1.5})"); }), "1.5");
  contains(refusal([] { parse_device_map(R"({"a": 1, "a": 0})"); }), "twice");
  contains(refusal([] { parse_device_map("[1]"); }), "object");
  contains(refusal([] { parse_device_map("{"); }), "not JSON");
  contains(refusal([] { parse_device_map(std::string(50'000, '[')); }), "200 deep");
  contains(refusal([] { read_device_map("there-is-no-such-file.json"); }), "there-is-no-such-file");
  contains(refusal([] { parse_max_memory("cpu=100"); }), "unit");
  contains(refusal([] { parse_max_memory("cpu"); }), "PLACE=SIZE");
  contains(refusal([] { parse_max_memory("cpu=1GB,cpu=2GB"); }), "twice");
  contains(refusal([] { parse_max_memory("tpu=1GB"); }), "'tpu'");
  contains(refusal([] { get_max_memory({{Place::cpu(), -1}}); }), "-1");
  contains(refusal([] { ElementType::of("float17"); }), "float17");
  contains(refusal([] {
             ModelTree huge;
             huge.add_parameter("p", {std::int64_t{1} << 40, std::int64_t{1} << 40}, f32());
           }),
           "shape");
  const MaxMemory limits = parse_max_memory("disk=1TB, cpu=40MiB,1=10GiB,0=10GB");
  EXPECT_EQ(limits, (MaxMemory{{Place::accelerator(0), 10'000'000'000},
                               {Place::accelerator(1), std::int64_t{10} << 30},
                               {Place::cpu(), 40 << 20},
                               {Place::disk(), 1'000'000'000'000}}));
}

}  // namespace
}  // namespace accelerate
