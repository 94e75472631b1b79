// Small pickles that would fill the memory or take for ever: refused soon, with a budget in
// proportion to the file.
#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "checkpoint/unpickler.hpp"
#include "support/message_of.hpp"

namespace accelerate::checkpoints {
namespace {

using namespace std::string_literals;

std::string four(std::size_t number) {
  std::string bytes(4, '\0');
  for (std::size_t i = 0; i < 4; ++i) bytes[i] = static_cast<char>(number >> (8 * i));
  return bytes;
}
std::string repeated(const std::string& what, std::size_t times) {
  std::string all;
  for (std::size_t i = 0; i < times; ++i) all += what;
  return all;
}
std::string text(const std::string& value) { return "X" + four(value.size()) + value; }
std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}

c10::Storage storage_of(std::string_view, std::uint64_t bytes) {
  return at::empty({static_cast<std::int64_t>(bytes)}, at::kByte).storage();
}
PyValue read(const std::string& operations) {
  return unpickle("\x80\x02" + operations + ".", storage_of, "small.pt");
}
void expect_refused_soon(const std::string& operations, const char* why) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string message = testing::message_of([&] { read(operations); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_NE(message.find(why), std::string::npos) << message;
}
constexpr const char* kTooLarge = "far larger than the file";

// A dict of `count` keys, remembered as number 1.
std::string remembered_dict(int count) {
  std::string dict = "}(";
  for (int i = 0; i < count; ++i) dict += text(accelerate::text::concat("key", i)) + "N";
  return dict + "uq\x01";
}

TEST(HostilePickle, ObjectsOfOneByteEach) {
  expect_refused_soon("](" + repeated("}", 700'000) + "e", kTooLarge);
}

TEST(HostilePickle, WhatWasRememberedIsCopiedAgainAndAgain) {
  const std::string ordered = global("collections", "OrderedDict") + ")Rq\x02";
  expect_refused_soon(remembered_dict(5000) + ordered +
                          repeated("h\x01"
                                   "b",
                                   20'000),
                      kTooLarge);

  const std::string encode = global("_codecs", "encode") + "q\x03" +
                             text(std::string(100'000, 'x')) + "q\x04" + text("latin1") + "q\x05";
  expect_refused_soon(encode + repeated("h\x03h\x04h\x05\x86R0", 20'000), kTooLarge);

  const std::string device =
      global("torch", "device") + "q\x03" + text(std::string(100'000, 'x')) + "q\x04";
  expect_refused_soon(device + repeated("h\x03h\x04\x85R0", 20'000),
                      "a device in it has a name of");

  const std::string shape = "(" + repeated("K\x01", 50'000) + "tq\x06";
  const std::string storage = "(" + text("storage") + global("torch", "FloatStorage") + text("0") +
                              text("cpu") + "K\x01tQq\x07";
  const std::string tensor = global("torch._utils", "_rebuild_tensor_v2") + "q\x08";
  expect_refused_soon(
      shape + storage + tensor + repeated("h\x08(h\x07K\0h\x06h\x06\x89NtR0"s, 20'000),
      "has 50000 numbers");

  // {"conj": False} 5000 times over, described for each of 20,000 tensors.
  const std::string description = "}(" + repeated(text("conj") + "\x89", 5000) + "uq\x01";
  expect_refused_soon(
      description + storage + tensor + repeated("h\x08(h\x07K\0))\x89Nh\x01tR0"s, 20'000),
      kTooLarge);
}

TEST(HostilePickle, LargeHonestValuesAreRead) {
  EXPECT_EQ(read("](" + repeated("K\x05", 1'000'000) + "e").as_list().size(), 1'000'000U);
  for (const char* one_byte : {"N", "\x88", "\x89"})  // None, True, False
    EXPECT_EQ(read("](" + repeated(one_byte, 300'000) + "e").as_list().size(), 300'000U);
  EXPECT_EQ(read("](" + repeated("G\x3f\xe0\0\0\0\0\0\0"s, 200'000) + "e").as_list().size(),
            200'000U);
  EXPECT_EQ(read(remembered_dict(100'000)).as_dict().items.size(), 100'000U);
}

}  // namespace
}  // namespace accelerate::checkpoints
