#include "accelerator/checkpoint_names.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <algorithm>

namespace accelerate::detail {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "checkpoint_";

bool is_complete(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_regular_file(folder / io::Manifest::kFileName, ignored);
}

}  // namespace

std::string numbered(const std::string& name, std::size_t index) {
  return index == 0 ? name : text::concat(name, "_", index);
}

std::string checkpoint_name(std::int64_t number) {
  return std::string(kPrefix) + std::to_string(number);  // not as the global locale writes it
}

std::int64_t number_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return -1;
  const auto number = text::to_int(std::string_view(name).substr(kPrefix.size()));
  return number && *number >= 0 && checkpoint_name(*number) == name ? *number : -1;
}

std::map<std::int64_t, fs::path> numbered_folders(const fs::path& parent) {
  std::map<std::int64_t, fs::path> found;
  std::error_code ignored;
  if (!fs::is_directory(parent, ignored)) return found;
  for (const std::string& name : io::names_in(parent)) {
    if (const auto number = number_of(name); number >= 0) found.emplace(number, parent / name);
  }
  return found;
}

fs::path newest_checkpoint(const fs::path& parent) {
  const auto folders = numbered_folders(parent);
  for (auto newest = folders.rbegin(); newest != folders.rend(); ++newest) {
    const fs::path& folder = newest->second;
    if (is_complete(folder)) return folder;
    if (io::names_in(folder).empty()) continue;  // nothing was ever saved there
    // A folder gets such a name when everything is in it.
    throw CheckpointError(
        text::concat("The newest checkpoint, ", folder.string(), ", has no ",
                     io::Manifest::kFileName,
                     ": it was damaged, or is not one of this library's. Nothing was loaded; name "
                     "the checkpoint to go on from, or remove this folder."),
        folder.string());
  }
  throw CheckpointError(
      text::concat("There is no complete checkpoint in ", parent.string(), " to go on from."),
      parent.string());
}

std::vector<fs::path> superfluous(const fs::path& parent, const ProjectConfiguration& project) {
  std::vector<fs::path> complete;
  for (const auto& [number, folder] : numbered_folders(parent)) {
    if (is_complete(folder)) complete.push_back(folder);
  }
  const auto newest = static_cast<std::size_t>(*project.total_limit());
  if (complete.size() <= newest) return {};
  complete.resize(complete.size() - newest);
  if (project.keep_best() == 0) return complete;
  // The best of all, the newest included, would do; those are kept anyway.
  std::vector<std::pair<double, fs::path>> by_metric;
  std::erase_if(complete, [&](const fs::path& folder) {
    try {
      const Json metric = io::Manifest::read(folder).about.value("metric", Json());
      if (metric.is_number())
        by_metric.emplace_back(
            project.lower_is_better() ? metric.get<double>() : -metric.get<double>(), folder);
      return false;
    } catch (const Error& error) {
      // The one that was just saved is complete all the same.
      log::warning(text::concat("The old checkpoint ", folder.string(),
                                " may be among the best and is kept, as its metric cannot be read. "
                                "Delete it if you do not need it. ",
                                describe(error)));
      return true;
    }
  });
  std::stable_sort(by_metric.begin(), by_metric.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  by_metric.resize(std::min(by_metric.size(), static_cast<std::size_t>(project.keep_best())));
  std::erase_if(complete, [&](const fs::path& folder) {
    return std::any_of(by_metric.begin(), by_metric.end(),
                       [&](const auto& best) { return best.second == folder; });
  });
  return complete;
}

Json own_state(const Json& states, const comm::Group& group, const std::string& path) {
  if (states.size() == 1) return states[0];
  if (states.size() == static_cast<std::size_t>(group.size()))
    return states[static_cast<std::size_t>(group.rank())];
  throw CheckpointError(
      text::concat("In the checkpoint ", path, " each of ", states.size(),
                   " processes stood at a place of its own in a stream of data, and there are ",
                   group.size(), " processes now. Resume on as many as saved."),
      path);
}

std::int64_t batch_size(const std::vector<std::shared_ptr<data::LoaderCore>>& loaders) {
  return loaders.empty() ? 0 : loaders.front()->total_batch_size();
}

}  // namespace accelerate::detail
