#include "accelerator/checkpoint_names.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include "io/file_lock.hpp"

#include <algorithm>
#include <mutex>
#include <set>

namespace accelerate::detail {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "checkpoint_";
// The list of files of a checkpoint that is being deleted.
constexpr std::string_view kDeleted = ".manifest.json.deleted";

bool is_complete(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_regular_file(folder / io::Manifest::kFileName, ignored);
}

std::optional<double> metric_of(const fs::path& folder) {
  const Json about = io::Manifest::read(folder).about;
  const auto metric = about.find("metric");
  if (metric == about.end() || !metric->is_number()) return std::nullopt;
  return metric->get<double>();
}

}  // namespace

std::string numbered(const std::string& name, std::size_t index) {
  return index == 0 ? name : text::concat(name, "_", index);
}

std::string checkpoint_name(std::int64_t number) { return text::concat(kPrefix, number); }

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

std::optional<fs::path> best_checkpoint(const fs::path& parent,
                                        const ProjectConfiguration& project) {
  std::optional<std::pair<double, fs::path>> best;
  for (const auto& [number, folder] : numbered_folders(parent)) {
    if (!is_complete(folder)) continue;
    const auto metric = metric_of(folder);
    if (!metric) continue;
    const double rank = project.lower_is_better() ? *metric : -*metric;
    if (!best || rank <= best->first) best.emplace(rank, folder);
  }
  if (!best) return std::nullopt;
  return best->second;
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
      if (const auto metric = metric_of(folder)) {
        by_metric.emplace_back(project.lower_is_better() ? *metric : -*metric, folder);
      }
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

void delete_checkpoint(const fs::path& folder) {
  std::set<std::string> others;
  try {
    const auto all = io::files_in(folder);
    others.insert(all.begin(), all.end());
    others.erase(std::string(io::Manifest::kFileName));
    for (const io::SavedFile& file : io::Manifest::read(folder).files) others.erase(file.name);
  } catch (const CheckpointError& error) {
    log::warning(
        text::concat("The old checkpoint ", folder.string(),
                     " is kept: what belongs to it cannot be told. Delete it if you do not "
                     "need it. ",
                     describe(error)));
    return;
  }
  if (others.empty()) {
    // Under another name first: a checkpoint is complete, or none.
    const fs::path gone = folder.parent_path() / ("." + folder.filename().string() + ".partial");
    io::rename_durably(folder, gone);
    io::delete_path(gone);
    return;
  }
  log::info(text::concat("The old checkpoint ", folder.string(), " is deleted; ",
                         text::join(std::vector(others.begin(), others.end())),
                         " in its folder is not part of it and stays there."));
  io::rename_durably(folder / io::Manifest::kFileName, folder / kDeleted);
  finish_deleting(folder);
}

void finish_deleting(const fs::path& folder) {
  const fs::path list = folder / kDeleted;
  std::error_code ignored;
  if (!fs::is_regular_file(list, ignored)) return;
  for (const io::SavedFile& file : io::Manifest::parse(io::read_file(list), list).files) {
    io::delete_path(folder / file.name);
    // And the folders that it was alone in.
    for (fs::path above = fs::path(file.name).parent_path(); !above.empty();
         above = above.parent_path()) {
      if (!fs::remove(folder / above, ignored)) break;
    }
  }
  io::delete_path(list);
}

std::shared_ptr<io::FileLock> lock_of_project(const fs::path& parent) {
  static std::mutex mutex;
  static std::map<fs::path, std::weak_ptr<io::FileLock>> all;
  const std::lock_guard guard(mutex);
  const fs::path place = fs::weakly_canonical(parent);
  if (auto held = all[place].lock()) return held;
  const fs::path project = place.parent_path();
  io::make_folders(project);
  auto lock = std::make_shared<io::FileLock>(
      project / ("." + place.filename().string() + ".lock"),
      text::concat("The project ", project.string(), " is being saved to"),
      "Nothing of it was changed. Two runs in one project would delete each other's checkpoints: "
      "give each a project_dir of its own, or wait until the other has ended.");
  all[place] = lock;
  return lock;
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
