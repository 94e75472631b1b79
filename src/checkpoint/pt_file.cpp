#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/io/mapped_file.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>

#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <utility>

#include "checkpoint/pickler.hpp"
#include "checkpoint/unpickler.hpp"
#include "checkpoint/zip_reader.hpp"

namespace accelerate::checkpoints {

namespace fs = std::filesystem;

namespace {

// A state dict's pickle has some 150 bytes for each tensor. A value takes a byte of it and up to 64
// of memory.
constexpr std::size_t kMostPickleBytes = std::size_t{64} << 20;

[[noreturn]] void refuse(const fs::path& path, std::string_view why) {
  throw CheckpointError(text::concat(path.string(), " cannot be read: ", why), path.string());
}

void refuse_other_kinds(const io::MappedFile& file) {
  const std::string_view start(reinterpret_cast<const char*>(file.bytes().data()),
                               std::min<std::size_t>(file.size(), 300));
  // A pickle of the number 0x1950a86a20f9469cfc6c begins files of Python's torch.save before 1.6;
  // before 0.1.10 they were tar archives.
  const bool legacy = start.starts_with(
      std::string_view("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 14));
  const bool tar = start.size() > 262 && start.substr(257, 5) == "ustar";
  if (legacy || tar) {
    refuse(file.path(),
           "it is of the format that torch.save wrote before version 1.6. Convert it in Python: "
           "torch.save(torch.load(path, map_location=\"cpu\"), path).");
  }
  if (start.starts_with("\x80") && start.size() > 1 && static_cast<unsigned char>(start[1]) <= 5) {
    refuse(
        file.path(),
        "it is a bare pickle, which torch.save did not write. Save it in Python with torch.save.");
  }
}

c10::Storage storage_of(const std::shared_ptr<const io::MappedFile>& file,
                        std::span<const std::byte> bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  const auto size = static_cast<std::int64_t>(bytes.size());
  // torch.save aligns to 64 bytes. What another program wrote across its boundaries, no kernel
  // expects.
  if (bytes.empty() || reinterpret_cast<std::uintptr_t>(bytes.data()) % 16 != 0) {
    const at::Tensor copy = at::empty({size}, options);
    if (size > 0) std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
    return copy.storage();
  }
  return at::from_blob(
             const_cast<std::byte*>(bytes.data()), {size}, [file](void*) {}, options)
      .storage();
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

PyValue load_pt(const fs::path& path) {
  const auto file =
      std::make_shared<const io::MappedFile>(path, io::Advice::kNormal, io::Access::kCopyOnWrite);
  refuse_other_kinds(*file);
  const ZipReader zip(file);
  const auto& records = zip.records();
  if (records.contains("constants.pkl")) {
    refuse(path, "it is a TorchScript module. torch::jit::load reads it.");
  }
  const auto pickle = records.find("data.pkl");
  if (pickle == records.end())
    refuse(path, "there is no data.pkl in it, so torch.save did not write it.");
  if (pickle->second.size() > kMostPickleBytes) {
    refuse(path, text::concat("its pickle has ", pickle->second.size(), " bytes, and at most ",
                              kMostPickleBytes, " are read. Store large data as tensors."));
  }
  if (const auto order = records.find("byteorder");
      order != records.end() && text_of(order->second) != "little") {
    refuse(path,
           "it was written on a big-endian machine. Convert it in Python: "
           "torch.save(torch.load(path), path).");
  }
  std::map<std::string, c10::Storage, std::less<>> storages;
  const auto by_key = [&](std::string_view key, std::uint64_t bytes) {
    const std::string name = "data/" + std::string(key);
    const auto record = records.find(name);
    if (record == records.end())
      refuse(path, "the storage " + name.substr(0, 100) + " is missing.");
    if (record->second.size() != bytes) {
      refuse(path, text::concat("the storage ", name.substr(0, 100), " has ", record->second.size(),
                                " bytes, and ", bytes, " were expected."));
    }
    const auto at = storages.find(name);
    return at != storages.end()
               ? at->second
               : storages.emplace(name, storage_of(file, record->second)).first->second;
  };
  try {
    return unpickle(text_of(pickle->second), by_key, path);
  } catch (const c10::Error&) {
    std::throw_with_nested(
        CheckpointError(path.string() + " has a tensor that LibTorch refuses.", path.string()));
  }
}

void write_archive(const Pickled& pickled,
                   const std::function<void(std::span<const std::byte>)>& sink,
                   const std::string& path) {
  std::exception_ptr failure;
  try {
    // Of a failed write it is told nothing: LibTorch's writer throws in its destructor then, which
    // ends the process.
    caffe2::serialize::PyTorchStreamWriter writer(
        [&](const void* data, std::size_t bytes) -> std::size_t {
          if (failure) return bytes;
          try {
            sink({static_cast<const std::byte*>(data), bytes});
          } catch (...) {
            failure = std::current_exception();
          }
          return bytes;
        });
    const auto record = [&](const std::string& name, std::string_view text) {
      writer.writeRecord(name, text.data(), text.size());
    };
    record("data.pkl", pickled.pickle);
    record(".format_version", "1");
    record(".storage_alignment", "64");
    record("byteorder", "little");
    for (std::size_t i = 0; i < pickled.storages.size() && !failure; ++i) {
      const at::Tensor host = pickled.storages[i].to(at::kCPU);
      record("data/" + std::to_string(i),
             {static_cast<const char*>(host.const_data_ptr()), host.nbytes()});
    }
    writer.writeEndOfFile();
  } catch (const c10::Error&) {
    std::throw_with_nested(CheckpointError("Could not write " + path + ".", path));
  }
  if (failure) std::rethrow_exception(failure);
}

void save_pt(const PyValue& value, const fs::path& path) {
  const Pickled pickled = pickle(value);
  io::replace_file(path, [&](const fs::path& partial) {
    io::File file = io::File::create(partial);
    std::uint64_t at = 0;
    write_archive(
        pickled,
        [&](std::span<const std::byte> bytes) {
          file.write(bytes.data(), bytes.size(), at);
          at += bytes.size();
        },
        path.string());
    file.sync();
    file.close();
  });
}

}  // namespace accelerate::checkpoints
