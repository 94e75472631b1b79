// The one function that reads JSON: whatever the text is, it ends soon, in a value or an error.
#include "base/parse_json.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "support/message_of.hpp"

namespace accelerate {
namespace {

using testing::message_of;

std::string nested(std::size_t levels) {
  return std::string(levels, '[') + std::string(levels, ']');
}

TEST(ParseJson, GivesWhatTheTextSays) {
  const std::string text =
      R"({"z":[1,-2,0.5,1e300,18446744073709551615,true,null,"\u00e9"],"a":{"b":{}},"c":[[],[1]]})";
  const Json value = parse_json(text);
  EXPECT_EQ(value, Json::parse(text));
  EXPECT_EQ(value.dump(), Json::parse(text).dump());  // in the order of the text
  EXPECT_EQ(parse_json(" 7 "), 7);
  EXPECT_EQ(parse_json("[1, // one\n 2] /* two */", JsonComments::ignore), Json({1, 2}));
  EXPECT_EQ(parse_json(nested(kDeepestJson)).size(), 1U);
}

TEST(ParseJson, RefusesWhatWouldEndTheProcessOrMisleadIt) {
  const auto refusal = [](const std::string& text) {
    return message_of<DataError>([&] { parse_json(text); });
  };
  const auto expect = [&](const std::string& text, const char* part) {
    EXPECT_NE(refusal(text).find(part), std::string::npos)
        << text.substr(0, 40) << ": " << refusal(text);
  };
  expect(nested(kDeepestJson + 1), "200 deep");
  expect(nested(50'000), "200 deep");
  expect(std::string(1'000'000, '['), "200 deep");
  std::string objects;
  for (int i = 0; i < 50'000; ++i) objects += "{\"a\":";
  expect(objects, "200 deep");
  expect("{\"a\":1,\"b\":{\"a\":1,\"a\":2}}", "the key 'a' twice");
  expect(std::string("{}\0{}", 5), "byte 2 is a NUL");
  expect("", "not JSON");
  expect("{\"a\":", "not JSON");
  expect("{}{}", "not JSON");
  expect("\"\xff\"", "not JSON");
  expect("[1] // one", "not JSON");
}

TEST(ParseJson, TakesTimeInProportionToTheText) {
  // In quadratic time, each would take minutes.
  std::string flat = "{", filled = "[";
  for (int i = 0; i < 200'000; ++i) {
    const std::string name = "\"k" + std::to_string(i) + "\":";
    flat += (i > 0 ? "," : "") + name + "{}";
    filled += i > 0 ? ",[]" : "[]";
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(parse_json(flat + "}").size(), 200'000U);
  EXPECT_EQ(parse_json(filled + "]").size(), 200'000U);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace accelerate
