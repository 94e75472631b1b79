#include "parallel/consistency.hpp"

#include "comm/user_call.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>

#include <functional>
#include <string_view>

namespace accelerate::parallel {
namespace {

/// One line a tensor, from every rank; throws where the lines differ. A digest of all lines goes
/// first, so that ranks which agree exchange a few bytes.
void require_same_lines(const std::vector<std::string>& lines, const comm::Group& group,
                        const char* what, const char* advice) {
  const std::string all = text::join(lines, "\n", lines.size());
  const std::size_t digest = std::hash<std::string>{}(all);
  bool same = true;
  for (const std::string& other : group.all_gather_bytes(std::to_string(digest)))
    same &= other == std::to_string(digest);
  if (same) return;

  std::vector<std::vector<std::string>> by_rank;
  std::size_t longest = 0;
  for (const std::string& other : group.all_gather_bytes(all)) {
    by_rank.push_back(text::split(other, '\n'));
    longest = std::max(longest, by_rank.back().size());
  }
  for (const auto line : c10::irange(longest)) {
    std::string found;
    bool differs = false;
    for (const auto rank : c10::irange(by_rank.size())) {
      const std::string text = line < by_rank[rank].size() ? by_rank[rank][line] : "nothing";
      differs |= line >= by_rank[0].size() || text != by_rank[0][line];
      found += text::concat(rank == 0 ? "" : "; ", "rank ", rank, " has ", text);
    }
    if (differs) {
      throw DistributedError(text::concat("The ranks do not hold the same module: ", what, " ",
                                          line, " differs: ", found, ". ", advice),
                             "verify_parameters", group.rank());
    }
  }
}

std::uint64_t checksum(const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().cpu().contiguous();
  const std::string_view bytes(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
  return std::hash<std::string_view>{}(bytes);
}

}  // namespace

void require_same_structure(const std::vector<NamedTensor>& tensors, const comm::Group& group) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : tensors) {
    lines.push_back(text::concat(name, " ", tensor.scalar_type(), " [",
                                 text::join(tensor.sizes(), ", ", 64), "]",
                                 tensor.requires_grad() ? " trainable" : ""));
  }
  require_same_lines(lines, group, "entry",
                     "Construct the same module, with the same options, on every rank.");
}

void require_same_values(const std::vector<NamedTensor>& tensors, const comm::Group& group) {
  const comm::UserCall call("verify_parameters()");
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : tensors)
    lines.push_back(text::concat(name, " with checksum ", checksum(tensor)));
  require_same_lines(lines, group, "the value of entry",
                     "Something changed it on one rank only, outside the prepared optimizer.");
}

}  // namespace accelerate::parallel
