#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/tree_codec.hpp>

#include <ATen/ops/empty.h>

#include <cstring>
#include <vector>

namespace accelerate::tree {
namespace {
constexpr char kInteger = 'i', kReal = 'r', kText = 's', kTensor = 't', kUndefined = 'u';
}

void Writer::integer(std::int64_t value) {
  bytes_.push_back(kInteger);
  raw(&value, sizeof value);
}

void Writer::real(double value) {
  bytes_.push_back(kReal);
  raw(&value, sizeof value);
}

void Writer::text(std::string_view value) {
  bytes_.push_back(kText);
  const auto size = static_cast<std::int64_t>(value.size());
  raw(&size, sizeof size);
  raw(value.data(), value.size());
}

void Writer::tensor(const at::Tensor& value) {
  if (!value.defined()) {
    bytes_.push_back(kUndefined);
    return;
  }
  if (value.layout() != at::kStrided || value.is_quantized()) {
    throw UnsupportedError(
        text::concat("A tensor with layout ", c10::toString(value.layout()), " and dtype ",
                     c10::toString(value.scalar_type()),
                     " cannot be sent to another process. Make it dense first."));
  }
  const at::Tensor flat = value.detach().to(at::kCPU).contiguous().resolve_conj().resolve_neg();
  bytes_.push_back(kTensor);
  const auto dtype = static_cast<std::int64_t>(flat.scalar_type());
  const std::int64_t dim = flat.dim();
  raw(&dtype, sizeof dtype);
  raw(&dim, sizeof dim);
  raw(flat.sizes().data(), dim * sizeof(std::int64_t));
  raw(flat.const_data_ptr(), flat.nbytes());
}

std::string_view Reader::raw(std::size_t size) {
  if (size > bytes_.size())
    throw DataError(text::concat("A tree received from another process is cut off: ", size,
                                 " bytes expected, ", bytes_.size(), " left."));
  const std::string_view found = bytes_.substr(0, size);
  bytes_.remove_prefix(size);
  return found;
}

void Reader::expect(char tag, const char* what) {
  const char found = raw(1)[0];
  if (found != tag) {
    throw DataError(text::concat("A tree received from another process has a '", found, "' where ",
                                 what, " was expected. All processes must run the same program."));
  }
}

std::int64_t Reader::integer() {
  expect(kInteger, "an integer");
  std::int64_t value = 0;
  std::memcpy(&value, raw(sizeof value).data(), sizeof value);
  return value;
}

double Reader::real() {
  expect(kReal, "a number");
  double value = 0;
  std::memcpy(&value, raw(sizeof value).data(), sizeof value);
  return value;
}

std::string Reader::text() {
  expect(kText, "a string");
  std::int64_t size = 0;
  std::memcpy(&size, raw(sizeof size).data(), sizeof size);
  return std::string(raw(static_cast<std::size_t>(size)));
}

std::size_t Reader::count() {
  const std::int64_t value = integer();
  if (value < 0 || static_cast<std::uint64_t>(value) > bytes_.size()) {
    throw DataError(text::concat("A tree received from another process claims ", value,
                                 " items in ", bytes_.size(), " bytes."));
  }
  return static_cast<std::size_t>(value);
}

at::Tensor Reader::tensor() {
  if (!bytes_.empty() && bytes_.front() == kUndefined) {
    raw(1);
    return {};
  }
  expect(kTensor, "a tensor");
  std::int64_t dtype = 0, dim = 0;
  std::memcpy(&dtype, raw(sizeof dtype).data(), sizeof dtype);
  std::memcpy(&dim, raw(sizeof dim).data(), sizeof dim);
  if (dtype < 0 || dtype >= static_cast<std::int64_t>(at::ScalarType::Undefined) || dim < 0 ||
      dim > 64) {
    throw DataError(text::concat("A tree received from another process has a tensor of dtype ",
                                 dtype, " and ", dim, " dimensions."));
  }
  std::vector<std::int64_t> sizes(dim);
  std::memcpy(sizes.data(), raw(dim * sizeof(std::int64_t)).data(), dim * sizeof(std::int64_t));
  const auto item = static_cast<std::int64_t>(c10::elementSize(static_cast<at::ScalarType>(dtype)));
  std::int64_t bytes = item;
  for (const std::int64_t size : sizes) {
    if (size < 0 || (size > 0 && bytes > static_cast<std::int64_t>(bytes_.size()) / size)) {
      throw DataError(text::concat("A tree received from another process has a tensor of shape [",
                                   text::join(sizes), "], larger than what came."));
    }
    bytes *= size;
  }
  const std::string_view data = raw(static_cast<std::size_t>(bytes));
  at::Tensor value =
      at::empty(sizes, at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)));
  if (bytes > 0) std::memcpy(value.data_ptr(), data.data(), data.size());
  return value;
}

}  // namespace accelerate::tree
