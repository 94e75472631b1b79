#include <accelerate/data/shard.hpp>

#include <algorithm>

namespace accelerate::data {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t pace_of(const ShardRule& rule, std::int64_t length) {
  return rule.pace > 0 ? rule.pace : length;
}

std::int64_t whole_groups(const ShardRule& rule, std::int64_t pace) {
  return std::max<std::int64_t>(pace - rule.origin, 0) / (rule.block() * rule.group) * rule.group;
}

// All but `last`.
StepShare part_of_step(const ShardRule& rule, std::int64_t step, int rank, std::int64_t length) {
  const std::int64_t block = rule.block();
  const std::int64_t start = rule.origin + step * block;
  const std::int64_t pace = pace_of(rule, length);
  const std::int64_t left = pace - start;
  StepShare share;
  if (rule.drop_last ? step >= whole_groups(rule, pace) : left <= 0) return share;

  if (left >= block) {
    share.first = start + rank * rule.batch;
    share.count = rule.batch;
    share.global_count = block;
  } else {
    const std::int64_t part = rule.spread_last ? ceil_div(left, rule.world) : rule.batch;
    share.first = start + rank * part;
    share.count = rule.even ? part : std::clamp<std::int64_t>(left - rank * part, 0, part);
    share.global_count = rule.even ? part * rule.world : left;
  }
  share.real = std::clamp<std::int64_t>(length - share.first, 0, share.count);
  share.global_real = std::clamp<std::int64_t>(length - start, 0, share.global_count);
  share.exists = share.count > 0;
  return share;
}

}  // namespace

StepShare share_of_step(const ShardRule& rule, std::int64_t step, int rank, std::int64_t length) {
  StepShare share = part_of_step(rule, step, rank, length);
  if (!share.exists) return share;
  const std::int64_t pace = pace_of(rule, length);
  if (rule.drop_last) {
    share.last = step == whole_groups(rule, pace) - 1;
  } else {
    const bool last_block = pace - rule.origin - step * rule.block() <= rule.block();
    share.last = last_block || (!rule.even && !part_of_step(rule, step + 1, rank, length).exists);
  }
  return share;
}

std::int64_t needed_length(const ShardRule& rule, std::int64_t step) {
  const std::int64_t block = rule.block();
  if (rule.drop_last) return rule.origin + (step / rule.group + 2) * rule.group * block;
  const std::int64_t next = rule.origin + (step + 1) * block;
  return rule.even ? next + 1 : next + block;
}

std::int64_t count_steps(const ShardRule& rule, int rank, std::int64_t length) {
  const std::int64_t pace = pace_of(rule, length);
  if (rule.drop_last) return whole_groups(rule, pace);
  const std::int64_t left = std::max<std::int64_t>(pace - rule.origin, 0);
  const std::int64_t whole = left / rule.block();
  return whole +
         (left % rule.block() != 0 && share_of_step(rule, whole, rank, length).exists ? 1 : 0);
}

std::int64_t remainder(const ShardRule& rule, std::int64_t length) {
  if (rule.drop_last || length <= rule.origin) return 0;
  return (length - rule.origin) % rule.block();
}

std::int64_t fill_position(const ShardRule& rule, std::int64_t position, std::int64_t length) {
  return (position - length) % std::min(length, rule.block());
}

std::vector<std::int64_t> positions(const ShardRule& rule, const StepShare& share,
                                    std::int64_t length) {
  std::vector<std::int64_t> found;
  found.reserve(share.count);
  for (std::int64_t p = share.first; p < share.first + share.count; ++p) {
    found.push_back(p < length ? p : fill_position(rule, p, length));
  }
  return found;
}

Range contiguous_part(std::int64_t length, int part, int parts) {
  const std::int64_t base = length / parts;
  const std::int64_t extra = length % parts;
  const std::int64_t begin = part * base + std::min<std::int64_t>(part, extra);
  return {begin, begin + base + (part < extra ? 1 : 0)};
}

}  // namespace accelerate::data
