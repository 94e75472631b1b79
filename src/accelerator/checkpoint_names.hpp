#pragma once

#include <accelerate/accelerator/checkpointing.hpp>

#include <accelerate/checkpoint/optimizer_state.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::detail {

// "model", "model_1", as the original calls files.
std::string numbered(const std::string& name, std::size_t index);
// "checkpoint_3", and back; -1 for other names.
std::string checkpoint_name(std::int64_t number);
std::int64_t number_of(const std::filesystem::path& folder);
// Every folder of such a name, complete or not.
std::map<std::int64_t, std::filesystem::path> numbered_folders(const std::filesystem::path& parent);
// The one with the highest number. Throws CheckpointError when there is none, or it lost its
// manifest.
std::filesystem::path newest_checkpoint(const std::filesystem::path& parent);
// The complete one with the best metric, the newest of equals. Nothing when none has one.
std::optional<std::filesystem::path> best_checkpoint(const std::filesystem::path& parent,
                                                     const ProjectConfiguration& project);
// Complete ones beyond the limit, that are not among the best either; never the newest.
std::vector<std::filesystem::path> superfluous(const std::filesystem::path& parent,
                                               const ProjectConfiguration& project);
// Removes a checkpoint; what others put into its folder stays there.
void delete_checkpoint(const std::filesystem::path& folder);
// Goes on where a process died in the middle of that; nothing elsewhere.
void finish_deleting(const std::filesystem::path& folder);
// Held by a run from its first save into the numbered checkpoints of `parent` to its end: a second
// one would share their numbers and delete the other's. One for all of a process. Throws
// CheckpointError, naming the other run, when another has it.
std::shared_ptr<io::FileLock> lock_of_project(const std::filesystem::path& parent);
// What stands before the names of each module's parameters in an optimizer's state.
std::vector<checkpoints::NamedModule> named_modules(const Prepared& prepared);
// A loader's state on this process, out of that of all processes that saved. Throws CheckpointError
// when those stood at different places and were not as many as there are now.
Json own_state(const Json& states, const comm::Group& group, const std::string& path);

// Samples of one step on all processes together: of the loader that was prepared first, which by
// custom is the one to train with; 0 without loaders.
std::int64_t batch_size(const std::vector<std::shared_ptr<data::LoaderCore>>& loaders);

}  // namespace accelerate::detail
