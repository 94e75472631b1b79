#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/core/memory.hpp>
#include <base/in_threads.hpp>
#include <big_model/checkpoint_source.hpp>
#include <big_model/devices.hpp>
#include <big_model/huge_pages.hpp>
#include <big_model/parts.hpp>
#include <intercept/internal_ops.hpp>
#include <intercept/replace.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <set>
#include <system_error>
#include <unordered_map>

namespace accelerate {
namespace {

using big_model::CheckpointSource;
using big_model::device_of;

// Read in pieces of this size, so that threads share a large weight and small ones cost little.
constexpr std::int64_t kPieceBytes = std::int64_t{16} << 20;

struct Weight {
  NamedTensor entry;      // the module's
  std::string stored_as;  // in the checkpoint
  at::ScalarType dtype;   // that it is to have
  Place place;
  bool fill_in_place = false;
};

struct Piece {
  const Weight* weight;
  std::int64_t begin;  // in elements
  at::Tensor part;
  bool mapped;
};

// Has the kernel read the pages of a mapped file in, and says so when it cannot: later that would
// be a signal.
void read_pages(const Piece& piece, const std::filesystem::path& path) {
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(piece.part.const_data_ptr());
  const std::uintptr_t from = begin / page * page;
  const std::uintptr_t to = (begin + piece.part.nbytes() + page - 1) / page * page;
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14
  if (madvise(reinterpret_cast<void*>(from), to - from, kPopulateRead) == 0) return;
  if (errno == EINVAL) {
    madvise(reinterpret_cast<void*>(from), to - from, MADV_WILLNEED);
    return;
  }
  throw CheckpointError(
      text::concat("The weight '", piece.weight->stored_as, "' could not be read from ", path, ": ",
                   std::generic_category().message(errno), "."),
      path.string());
}

// Modules that stay in float32 are named by a part of their path.
at::ScalarType dtype_for(const std::string& name, at::ScalarType own, const LoadOptions& options) {
  const auto& wanted = options.dtype();
  if (!wanted || !c10::isFloatingType(own)) return own;
  if (*wanted == at::kHalf || *wanted == at::kBFloat16) {
    for (const std::string& key : options.keep_in_fp32_modules()) {
      if (name == key || name.find(key + ".") != std::string::npos) return at::kFloat;
    }
  }
  return *wanted;
}

std::string bytes_text(std::int64_t bytes) { return text::format_bytes(bytes); }

class Loader {
 public:
  Loader(const ModuleRecord& module, const std::filesystem::path& path, const DeviceMap& map,
         const LoadOptions& options, bool offload_buffers)
      : module_(module), path_(path), map_(map), options_(options), source_(path) {
    check_device_map(model_tree(module), map);
    big_model::check_places(map);
    for (const auto& names : module.tied()) tied_[names.front()] = names;
    for (const NamedTensor& entry : module.parameters()) match(entry, false, offload_buffers);
    for (const NamedTensor& entry : module.buffers()) match(entry, true, offload_buffers);
    for (const std::string& name : source_.names()) {
      if (!used_.contains(name)) report_.unexpected.push_back(name);
    }
    refuse_differences();
    refuse_lack_of_memory();
  }

  LoadReport load() {
    const intercept::InternalOpsGuard internal;
    if (options_.progress())
      bar_.emplace(ProgressOptions(options_.bar()).total(bytes_to_read()).unit("bytes"));
    leave_on_disk();
    std::vector<Piece> pieces;
    std::vector<at::Tensor> targets;
    for (const Weight& weight : weights_) {
      if (weight.place == Place::disk()) continue;
      at::Tensor target = weight.entry.tensor.detach();
      const at::Tensor mapped = map(weight);
      if (mapped.defined()) {
        target = mapped;
      } else if (!weight.fill_in_place) {
        // In the module's own order in memory, channels last for example.
        target = at::empty_like(weight.entry.tensor,
                                at::TensorOptions(device_of(weight.place)).dtype(weight.dtype));
        big_model::use_huge_pages(target);
      }
      targets.push_back(target);
      cut(weight, target, mapped.defined(), pieces);
    }
    read(pieces);
    bar_.reset();
    std::size_t next = 0;
    for (const Weight& weight : weights_) {
      if (weight.place == Place::disk()) continue;
      if (!weight.fill_in_place) intercept::replace_data(weight.entry.tensor, targets[next]);
      weight.entry.tensor.unsafeGetTensorImpl()->bump_version();
      ++next;
    }
    if (!report_.unexpected.empty()) {
      log::warning(text::concat("Weights of the checkpoint ", path_,
                                " that the module does not have: ", text::join(report_.unexpected),
                                "."));
    }
    if (!report_.missing.empty()) {
      log::warning(text::concat("Weights of the module that the checkpoint ", path_,
                                " does not have: ", text::join(report_.missing), "."));
    }
    return std::move(report_);
  }

 private:
  void match(const NamedTensor& entry, bool is_buffer, bool offload_buffers) {
    // A tagged one without memory was left behind by a handle.
    if (intercept::is_claimed(entry.tensor) && !entry.tensor.is_meta()) {
      throw StateError(
          text::concat("'", entry.name,
                       "' is sharded or offloaded. Load a checkpoint before the module "
                       "is dispatched or prepared."));
    }
    std::vector<std::string> names{entry.name};
    if (const auto found = tied_.find(entry.name); found != tied_.end()) names = found->second;
    std::string stored;
    for (const std::string& name : names) {
      if (!source_.contains(name)) continue;
      used_.insert(name);
      if (stored.empty()) {
        stored = name;
      } else if (!source_.are_equal(stored, name)) {
        log::warning(text::concat(
            "The checkpoint ", path_, " has different values for '", stored, "' and '", name,
            "', which are one weight of the module. It gets those of '", stored, "'."));
      }
    }
    if (stored.empty()) {
      report_.missing.push_back(entry.name);
      return;
    }
    if (const auto shape = source_.shape(stored); at::IntArrayRef(shape) != entry.tensor.sizes()) {
      differences_.push_back(text::concat("'", stored, "' is [", text::join(shape),
                                          "] in the checkpoint and [",
                                          text::join(entry.tensor.sizes()), "] in the module"));
    }
    if (c10::isFloatingType(source_.dtype(stored)) &&
        c10::isIntegralType(entry.tensor.scalar_type(), /*includeBool=*/true)) {
      differences_.push_back(text::concat("'", stored, "' is ", source_.dtype(stored),
                                          " in the checkpoint and ", entry.tensor.scalar_type(),
                                          " in the module, which would lose what is no whole "
                                          "number"));
    }
    Weight weight{entry, stored, dtype_for(entry.name, entry.tensor.scalar_type(), options_),
                  *place_of(map_, entry.name)};
    if (is_buffer && !offload_buffers && weight.place == Place::disk()) weight.place = Place::cpu();
    weight.fill_in_place = weight.dtype == entry.tensor.scalar_type() &&
                           entry.tensor.device() == device_of(weight.place);
    weights_.push_back(std::move(weight));
  }

  void refuse_differences() const {
    std::vector<std::string> all = differences_;
    if (options_.strict()) {
      for (const std::string& name : report_.missing)
        all.push_back(text::concat("'", name, "' is not in the checkpoint"));
      for (const std::string& name : report_.unexpected)
        all.push_back(text::concat("'", name, "' is not in the module"));
    }
    if (all.empty()) return;
    throw CheckpointError(text::concat("The checkpoint ", path_,
                                       " is not one of this module: ", text::join(all, "; "), "."),
                          path_.string());
  }

  void refuse_lack_of_memory() const {
    std::map<std::string, std::pair<at::Device, std::int64_t>> needed;
    for (const Weight& weight : weights_) {
      if (weight.place == Place::disk() || weight.fill_in_place) continue;
      const at::Device device = device_of(weight.place);
      auto& entry = needed.try_emplace(device.str(), device, 0).first->second;
      entry.second +=
          weight.entry.tensor.numel() * static_cast<std::int64_t>(c10::elementSize(weight.dtype));
    }
    for (const auto& [name, entry] : needed) {
      const auto& [device, bytes] = entry;
      const std::int64_t free = available_memory(device);
      if (bytes <= free) continue;
      throw OutOfMemoryError(
          text::concat("The weights that the device map puts on ", name, " need ",
                       bytes_text(bytes), ", and ", bytes_text(free),
                       " are free there. Put more of them on the disk, or load in a smaller "
                       "dtype."));
    }
  }

  // Weights on the disk keep their shape only.
  void leave_on_disk() {
    std::vector<NamedTensor> to_copy;
    std::unordered_map<std::string, const Weight*> by_name;
    for (const Weight& weight : weights_) {
      if (weight.place != Place::disk()) continue;
      const at::Tensor like =
          at::empty(weight.entry.tensor.sizes(), at::TensorOptions(at::kMeta).dtype(weight.dtype));
      to_copy.push_back({weight.entry.name, like});
      by_name[weight.entry.name] = &weight;
    }
    if (to_copy.empty()) return;
    if (!options_.offload_folder().empty()) {
      report_.on_disk =
          offload_state_dict(options_.offload_folder(), to_copy, [&](const NamedTensor& entry) {
            const Weight& weight = *by_name.at(entry.name);
            at::Tensor values = at::empty(entry.tensor.sizes(), at::TensorOptions(weight.dtype));
            if (values.numel() == 0) return values;
            source_.read(weight.stored_as, 0, values);
            report_.bytes += stored_bytes(weight, values.numel());
            if (bar_) bar_->set(report_.bytes);
            return values;
          });
    } else if (const WeightStore* store = source_.store()) {
      for (const NamedTensor& entry : to_copy)
        report_.on_disk.add(entry.name, *store->find(by_name.at(entry.name)->stored_as));
    } else {
      throw ConfigError(
          text::concat("The checkpoint ", path_,
                       " is of torch.save, which weights cannot be read from while the "
                       "module runs. Set LoadOptions::offload_folder to where they can "
                       "be copied, or convert the checkpoint to safetensors."));
    }
    for (const NamedTensor& entry : to_copy)
      intercept::replace_data(by_name.at(entry.name)->entry.tensor, entry.tensor);
  }

  // The weight's memory in the mapped file, if it is to have that.
  at::Tensor map(const Weight& weight) const {
    const at::Tensor& tensor = weight.entry.tensor;
    if (!options_.memory_map() || !tensor.is_meta() || weight.place != Place::cpu() ||
        !tensor.is_contiguous() || source_.dtype(weight.stored_as) != weight.dtype)
      return {};
    return source_.map(weight.stored_as);
  }

  void cut(const Weight& weight, const at::Tensor& target, bool mapped,
           std::vector<Piece>& pieces) const {
    big_model::for_parts(target, kPieceBytes / static_cast<std::int64_t>(target.element_size()),
                         [&](std::int64_t begin, const at::Tensor& part) {
                           pieces.push_back({&weight, begin, part, mapped});
                         });
  }

  void read(const std::vector<Piece>& pieces) {
    if (pieces.empty()) return;
    const std::size_t wanted =
        options_.threads() > 0 ? static_cast<std::size_t>(options_.threads()) : reading_threads();
    std::atomic<std::int64_t> done{report_.bytes};
    const auto watch = [&] { bar_->set(done.load()); };
    in_threads(
        std::min(wanted, pieces.size()), pieces.size(),
        [&] {
          return [&](std::size_t i) {
            const intercept::InternalOpsGuard internal;
            const Piece& piece = pieces[i];
            if (piece.mapped) {
              read_pages(piece, source_.file(piece.weight->stored_as));
            } else {
              source_.read(piece.weight->stored_as, piece.begin, piece.part);
            }
            done += stored_bytes(*piece.weight, piece.part.numel());
          };
        },
        bar_ ? std::function<void()>(watch) : nullptr);
    report_.bytes = done.load();
    if (bar_) bar_->set(report_.bytes);
  }

  // Weights on the disk are read only when they are copied.
  std::int64_t bytes_to_read() const {
    std::int64_t total = 0;
    for (const Weight& weight : weights_) {
      if (weight.place == Place::disk() && options_.offload_folder().empty()) continue;
      total += stored_bytes(weight, weight.entry.tensor.numel());
    }
    return total;
  }

  std::int64_t stored_bytes(const Weight& weight, std::int64_t elements) const {
    return elements * static_cast<std::int64_t>(c10::elementSize(source_.dtype(weight.stored_as)));
  }

  const ModuleRecord& module_;
  std::filesystem::path path_;
  const DeviceMap& map_;
  const LoadOptions& options_;
  CheckpointSource source_;
  std::unordered_map<std::string, std::vector<std::string>> tied_;
  std::set<std::string> used_;
  std::vector<Weight> weights_;
  std::vector<std::string> differences_;
  LoadReport report_;
  std::optional<Progress> bar_;
};

}  // namespace

LoadReport load_checkpoint_in_model(const ModuleRecord& module,
                                    const std::filesystem::path& checkpoint, const DeviceMap& map,
                                    const LoadOptions& options, bool offload_buffers) {
  return Loader(module, checkpoint, map, options, offload_buffers).load();
}

DeviceMap device_map_for(const ModuleRecord& module, const std::string& name,
                         const LoadOptions& options) {
  const auto& given = options.max_memory();
  if (given) {
    for (const auto& [place, bytes] : *given)
      big_model::check_place(place, "LoadOptions::max_memory has a limit for");
  }
  SizeOptions sizes;
  if (options.dtype()) {
    sizes.dtype(element_type(*options.dtype()));
    SpecialDtypes kept;
    for (const auto* tensors : {&module.parameters(), &module.buffers()}) {
      for (const auto& [path, tensor] : *tensors) {
        const at::ScalarType dtype = dtype_for(path, tensor.scalar_type(), options);
        if (dtype != *options.dtype() && c10::isFloatingType(dtype))
          kept.emplace_back(path, element_type(dtype));
      }
    }
    sizes.special_dtypes(std::move(kept));
  }
  const auto available = [&] {
    return name == "sequential" ? get_max_memory() : big_model::leave_room(get_max_memory());
  };
  return named_device_map(
      name, model_tree(module), given ? *given : available(),
      DeviceMapOptions().no_split_module_classes(options.no_split_module_classes()).sizes(sizes));
}

}  // namespace accelerate
