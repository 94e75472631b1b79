#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/box_reader.hpp>
#include <accelerate/io/manifest.hpp>

#include <CLI/CLI.hpp>

#include "base/plain_text.hpp"
#include "cli/commands.hpp"

#include <algorithm>
#include <iostream>
#include <numeric>
#include <optional>

namespace accelerate::cli {
namespace {

namespace fs = std::filesystem;
namespace st = io::safetensors;

constexpr std::uint64_t kAtOnce = std::uint64_t{8} << 20;

void write_shard(const fs::path& path, std::vector<st::TensorInfo> infos,
                 const std::map<std::string, std::string>& metadata, const io::Manifest& manifest,
                 const std::string& group, io::BoxReader& reader) {
  st::Writer writer(path, st::Header(std::move(infos), metadata));
  std::vector<std::byte> buffer;
  for (const st::TensorInfo& info : writer.header().tensors()) {
    const io::SavedTensor& saved = *manifest.find(group, info.name);
    const io::SavedTensor tensor = st::bits(saved.dtype) % 8 == 0 ? saved : saved.as_bytes();
    const Placement all(tensor.shape);
    const auto step = static_cast<std::int64_t>(kAtOnce / tensor.bytes(1));
    for (std::int64_t first = 0; first < all.count(); first += step) {
      const std::int64_t count = std::min(step, all.count() - first);
      buffer.resize(tensor.bytes(count));
      reader.read(tensor, all.run(first, count).boxes(), buffer.data());
      writer.write(info, buffer, tensor.bytes(first));
    }
  }
  writer.finish();
}

void merge(const fs::path& checkpoint, const fs::path& out, const std::string& max_shard_size) {
  const fs::path in = io::replaced_folder(checkpoint);
  const std::uint64_t most = st::parse_size(max_shard_size);
  const io::Manifest manifest = io::Manifest::read(in);
  manifest.check_files(in);
  io::expect_no_checkpoint(out);  // before the checkpoint is verified, which may take long
  bool any = false;
  for (const auto& [group, tensors] : manifest.groups) {
    if (group != "model" && !group.starts_with("model_")) continue;
    // It becomes the beginning of file names.
    if (group != "model" && !text::to_int(std::string_view(group).substr(6))) {
      throw CheckpointError(
          text::concat("The checkpoint ", in.string(), " has weights of a model called '", group,
                       "', and models are called model, model_1 and so on."),
          in.string());
    }
    any = true;
    std::vector<bool> needed(manifest.files.size(), false);
    std::vector<st::TensorInfo> infos;
    for (const auto& [name, tensor] : tensors) {
      for (const io::SavedBox& own : tensor.boxes) needed[own.file] = true;
      infos.push_back({name, tensor.dtype, tensor.shape});
    }
    for (std::size_t f = 0; f < needed.size(); ++f) {
      if (!needed[f]) continue;
      std::vector<std::size_t> blocks(manifest.files[f].checksums.size());
      std::iota(blocks.begin(), blocks.end(), std::size_t{0});
      io::verify_blocks(in, manifest.files[f], blocks);
    }
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    if (const auto aliases = manifest.aliases.find(group); aliases != manifest.aliases.end())
      metadata.insert(aliases->second.begin(), aliases->second.end());
    io::BoxReader reader(in, manifest);
    const auto files =
        st::write_shards(out, group, st::split(std::move(infos), most),
                         [&](const fs::path& path, const std::vector<st::TensorInfo>& shard) {
                           write_shard(path, shard, metadata, manifest, group, reader);
                         });
    for (const std::string& file : files)
      std::cout << "wrote " << text::printable((out / file).string()) << "\n";
  }
  if (!any) {
    throw CheckpointError("The checkpoint " + in.string() + " has no model in it.", in.string());
  }
}

struct Options {
  std::string in, out, max_shard_size = "10GB";
};

}  // namespace

void add_merge_weights(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "merge-weights",
      "Make one set of safetensors files, as Python reads them, of a checkpoint's weights");
  command->add_option("checkpoint", options->in, "the folder that save_state wrote")->required();
  command->add_option("output", options->out, "the folder to write to")->required();
  command->add_option("--max-shard-size", options->max_shard_size, "the most bytes of a file")
      ->capture_default_str();
  command->callback([options, &exit_code] {
    merge(options->in, options->out, options->max_shard_size);
    exit_code = 0;
  });
}

}  // namespace accelerate::cli
