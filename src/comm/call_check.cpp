#include "comm/call_check.hpp"

#include "comm/agreed_call.hpp"
#include "comm/user_call.hpp"
#include "net/sha256.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>

namespace accelerate::comm {

thread_local const char* UserCall::current_ = nullptr;
thread_local bool AgreedCall::is_one_ = false;

namespace {

using text::concat;

// A note has what is called and then in which call of the program, each ended by a zero.
constexpr std::size_t kCallBytes = 700;
constexpr std::size_t kNoteBytes = 800;

std::string described(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return concat(c10::toString(tensor.scalar_type()), "[", text::join(tensor.sizes(), ", ", 64),
                "]");
}

std::string described(const char* operation, const std::vector<at::Tensor>& tensors,
                      const std::string& detail) {
  std::vector<std::string> each;
  for (const at::Tensor& tensor : tensors) each.push_back(described(tensor));
  std::string call = operation;
  if (!each.empty()) call += concat(" of ", text::join(each, ", ", each.size()));
  if (!detail.empty()) call += concat(" (", detail, ")");
  if (call.size() < kCallBytes) return call;
  // What does not fit is compared all the same.
  const auto digest = net::sha256(call);
  std::string shortened = call.substr(0, kCallBytes - 40);
  shortened += concat("... of ", each.size(), " tensors, ");
  constexpr const char* kDigits = "0123456789abcdef";
  for (std::size_t i = 0; i < 4; ++i) {
    shortened += kDigits[digest[i] >> 4];
    shortened += kDigits[digest[i] & 15];
  }
  return shortened;
}

struct Call {
  std::string what;
  std::string where;
  std::string text() const { return where.empty() ? what : concat(what, " in ", where); }
};

Call read_call(const char* note) {
  Call call{note, {}};
  call.where = note + call.what.size() + 1;
  return call;
}

}  // namespace

CallCheck::CallCheck(c10::intrusive_ptr<c10d::Backend> notes, std::shared_ptr<GroupWatch> watch)
    : notes_(std::move(notes)), watch_(std::move(watch)) {}

void CallCheck::compare(const char* operation, const std::vector<at::Tensor>& tensors,
                        const std::string& detail) const {
  if (AgreedCall::is_one()) return;
  const OperationName name = watch_->operation(operation);
  at::Tensor mine = at::zeros({static_cast<std::int64_t>(kNoteBytes)}, at::kByte);
  const std::string call = described(operation, tensors, detail);
  auto* note = reinterpret_cast<char*>(mine.mutable_data_ptr<std::uint8_t>());
  std::memcpy(note, call.data(), call.size());
  if (const char* where = UserCall::name())
    std::strncpy(note + call.size() + 1, where, kNoteBytes - call.size() - 2);
  at::Tensor all =
      at::empty({static_cast<std::int64_t>(kNoteBytes) * notes_->getSize()}, at::kByte);
  watch_->check_alive(operation);
  watch_->note_operation();
  try {
    notes_->_allgather_base(all, mine)->wait();
  } catch (...) {
    std::rethrow_exception(watch_->explain(std::current_exception(), name));
  }
  std::vector<Call> calls;
  const auto* notes = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  for (int rank = 0; rank < notes_->getSize(); ++rank)
    calls.push_back(read_call(notes + static_cast<std::size_t>(rank) * kNoteBytes));
  const auto as_first = [&](const Call& other) { return other.what == calls.front().what; };
  if (std::all_of(calls.begin(), calls.end(), as_first)) return;
  std::vector<std::string> found;
  for (std::size_t rank = 0; rank < calls.size(); ++rank)
    found.push_back(concat("rank ", rank, " calls ", calls[rank].text()));
  throw DistributedError(
      concat("The ranks of group \"", name.group,
             "\" make different calls at one place: ", text::join(found, "; "),
             ". All ranks have to make the same calls in the same order, with tensors of the same "
             "shapes and dtypes."),
      operation, name.rank);
}

}  // namespace accelerate::comm
