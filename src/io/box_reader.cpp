#include <accelerate/io/box_reader.hpp>

#include <cstring>
#include <utility>

namespace accelerate::io {

std::vector<Overlap> Overlap::of(const SavedTensor& saved, std::span<const PlacedBox> wanted) {
  const auto item = static_cast<std::int64_t>(saved.bytes(1));
  const std::size_t dimensions = saved.shape.size();
  std::vector<Overlap> found;
  for (const SavedBox& own : saved.boxes) {
    for (const PlacedBox& target : wanted) {
      const auto common = intersect(own.box, target.box);
      if (!common) continue;
      Overlap overlap;
      overlap.file_ = own.file;
      overlap.begin_ = own.position;
      overlap.place_ = target.offset * item;
      overlap.run_ = static_cast<std::uint64_t>(item);
      std::uint64_t last = 0;  // of the box's bytes, where the last run begins
      std::int64_t stride = item;
      auto& runs = overlap.dimensions_;
      // From the fastest dimension in the file to the slowest.
      for (std::size_t i = dimensions; i-- > 0;) {
        const std::size_t d = saved.order.empty() ? i : static_cast<std::size_t>(saved.order[i]);
        const auto size = static_cast<std::uint64_t>(common->sizes[d]);
        const auto from = static_cast<std::uint64_t>(stride);
        const std::int64_t to = target.strides[d] * item;
        stride *= own.box.sizes[d];
        overlap.begin_ +=
            static_cast<std::uint64_t>(common->offsets[d] - own.box.offsets[d]) * from;
        overlap.place_ += (common->offsets[d] - target.box.offsets[d]) * to;
        if (size == 1) continue;
        if (runs.empty() && from == overlap.run_ && to == static_cast<std::int64_t>(overlap.run_)) {
          overlap.run_ *= size;
          continue;
        }
        last += (size - 1) * from;
        if (!runs.empty() && from == runs.back().size * runs.back().from &&
            to == static_cast<std::int64_t>(runs.back().size) * runs.back().to) {
          runs.back().size *= size;
        } else {
          runs.push_back({size, from, to});
        }
      }
      std::reverse(runs.begin(), runs.end());
      overlap.end_ = overlap.begin_ + last + overlap.run_;
      found.push_back(std::move(overlap));
    }
  }
  return found;
}

Overlap::Cursor Overlap::seek(std::uint64_t from) const {
  Cursor at{std::vector<std::uint64_t>(dimensions_.size(), 0), begin_, run_, place_};
  if (from >= end_) {
    at.position = end_;
    return at;
  }
  if (from <= begin_) return at;
  std::uint64_t left = from - begin_;
  for (std::size_t d = 0; d < dimensions_.size(); ++d) {
    const Dimension& own = dimensions_[d];
    at.index[d] = std::min(left / own.from, own.size - 1);
    left -= at.index[d] * own.from;
    at.position += at.index[d] * own.from;
    at.place += static_cast<std::int64_t>(at.index[d]) * own.to;
  }
  if (left >= run_) {  // between this run and the next
    step(at);
    return at;
  }
  at.position += left;
  at.place += static_cast<std::int64_t>(left);
  at.bytes -= left;
  return at;
}

void Overlap::step(Cursor& at) const {
  // Back to the run's beginning.
  const std::uint64_t taken = run_ - at.bytes;
  at.position -= taken;
  at.place -= static_cast<std::int64_t>(taken);
  at.bytes = run_;
  for (std::size_t d = dimensions_.size(); d-- > 0;) {
    const Dimension& own = dimensions_[d];
    at.position += own.from;
    at.place += own.to;
    if (++at.index[d] < own.size) return;
    at.position -= own.size * own.from;
    at.place -= static_cast<std::int64_t>(own.size) * own.to;
    at.index[d] = 0;
  }
  at.position = end_;
}

BoxReader::BoxReader(std::filesystem::path folder, const Manifest& manifest)
    : folder_(std::move(folder)), manifest_(manifest) {}

const File& BoxReader::file(std::size_t index) {
  const std::lock_guard lock(mutex_);
  auto found = open_.find(index);
  if (found == open_.end())
    found = open_.emplace(index, File::open(folder_ / manifest_.files[index].name)).first;
  return found->second;
}

void BoxReader::read(const SavedTensor& saved, std::span<const PlacedBox> wanted,
                     std::byte* memory) {
  for (const Overlap& overlap : Overlap::of(saved, wanted))
    read(overlap, overlap.begin(), overlap.end(), memory);
}

void BoxReader::read(const Overlap& overlap, std::uint64_t from, std::uint64_t to,
                     std::byte* memory) {
  constexpr std::uint64_t kPage = 4096;
  constexpr std::uint64_t kAtOnce = std::uint64_t{1} << 20;
  const File& file = this->file(overlap.file());
  std::vector<std::byte> buffer;
  // Runs that are read together.
  std::uint64_t begin = 0, end = 0, runs = 0;
  std::int64_t first_place = 0;
  const auto read_them = [&] {
    if (runs == 0) return;
    bytes_read_ += end - begin;
    if (runs == 1) {
      file.read(memory + first_place, end - begin, begin);
      return;
    }
    buffer.resize(end - begin);
    file.read(buffer.data(), buffer.size(), begin);
    overlap.for_each_run(begin, end,
                         [&](std::uint64_t position, std::uint64_t bytes, std::int64_t place) {
                           std::memcpy(memory + place, buffer.data() + (position - begin), bytes);
                         });
  };
  overlap.for_each_run(
      from, to, [&](std::uint64_t position, std::uint64_t bytes, std::int64_t place) {
        if (runs > 0 && position < end + kPage && position + bytes <= begin + kAtOnce) {
          end = position + bytes;
          ++runs;
          return;
        }
        read_them();
        begin = position;
        end = position + bytes;
        runs = 1;
        first_place = place;
      });
  read_them();
}

}  // namespace accelerate::io
