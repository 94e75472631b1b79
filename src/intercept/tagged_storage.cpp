#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <intercept/policies.hpp>
#include <intercept/tagged_storage.hpp>

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <typeinfo>
#include <vector>

namespace accelerate::intercept {
namespace {

// StorageImpl can be told to refuse access to its data, with a message, but has no way back. The
// flag is private; an explicit instantiation may name a private member, and that is how it is
// reached.
bool& refuses_access(c10::StorageImpl& storage);
template <auto Flag>
struct Reach {
  friend bool& refuses_access(c10::StorageImpl& storage) { return storage.*Flag; }
};
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void refuse_access(c10::StorageImpl& storage, const std::string& message, at::Device device) {
  storage.get_extra_meta().custom_data_ptr_error_msg_ = message;
  refuses_access(storage) = true;
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, device));
}

// Of a storage whose values are gone.
class GivenUp final : public c10::Allocator {
 public:
  // Never destroyed: storages may outlive static destruction.
  static GivenUp& with_message(const char* message) {
    static std::mutex mutex;
    static auto* const all = new std::map<const char*, GivenUp*>;
    const std::lock_guard lock(mutex);
    GivenUp*& one = (*all)[message];
    if (one == nullptr) one = new GivenUp(message);
    return *one;
  }
  [[noreturn]] void refuse() const { throw StateError(message_); }
  c10::DataPtr allocate(std::size_t) override { refuse(); }
  void copy_data(void*, const void*, std::size_t) const override { refuse(); }

 private:
  explicit GivenUp(const char* message) : message_(message) {}
  const char* message_;
};

// Of the storage of a gradient's part.
class PartOfGradient final : public c10::Allocator {
 public:
  static PartOfGradient& instance() {
    static auto* const one = new PartOfGradient;  // never destroyed, as GivenUp
    return *one;
  }
  c10::DataPtr allocate(std::size_t) override {
    throw ShardingError(
        "Something tried to resize the gradient of a sharded parameter. Replace it instead.");
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

constexpr const char* kGone =
    "A parameter (or a view of one, or a graph that saved one) was used after what brought its "
    "values had ended: the strategy that sharded its module, or the dispatch that offloaded it. "
    "Keep the prepared or dispatched module for as long as its parameters are used, restore them "
    "before you let it go, and call backward() before remove_offload().";

at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKeySet keys, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

c10::DispatchKeySet tagged_keys(at::ScalarType dtype, at::Device device) {
  const c10::DispatchKeySet keys(c10::computeDispatchKey(dtype, c10::Layout::Strided, device));
  return keys | c10::getAutogradRelatedKeySetFromBackend(keys.highestBackendKey()) |
         c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) | c10::DispatchKeySet(kTag);
}

}  // namespace

TaggedStorage::TaggedStorage(int id, std::string name, std::int64_t elements, at::ScalarType dtype,
                             at::Device device, Owner& owner)
    : id_(id),
      name_(std::move(name)),
      elements_(elements),
      item_size_(c10::elementSize(dtype)),
      dtype_(dtype),
      device_(device),
      owner_(&owner),
      storage_(c10::Storage::use_byte_size_t(), c10::SymInt(bytes()), c10::DataPtr(nullptr, device),
               this,
               /*resizable=*/true) {
  install();
  empty();
}

TaggedStorage::~TaggedStorage() {
  refuse_access(*storage_.unsafeGetStorageImpl(), kGone, device_);
  storage_.unsafeGetStorageImpl()->set_allocator(&GivenUp::with_message(kGone));
}

TaggedStorage* TaggedStorage::of(const at::TensorBase& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) return nullptr;
  c10::Allocator* allocator = impl->unsafe_storage().unsafeGetStorageImpl()->allocator();
  if (allocator == nullptr) return nullptr;
  const std::type_info& type = typeid(*allocator);
  if (type == typeid(TaggedStorage)) return static_cast<TaggedStorage*>(allocator);
  if (type == typeid(GivenUp)) static_cast<const GivenUp*>(allocator)->refuse();
  return nullptr;
}

at::Tensor TaggedStorage::view(at::IntArrayRef sizes, at::IntArrayRef strides,
                               std::int64_t offset) const {
  return tensor_over(storage_, tagged_keys(dtype_, device_), dtype_, sizes, strides, offset);
}

void TaggedStorage::fill(at::Tensor contents) {
  TORCH_INTERNAL_ASSERT(contents.numel() == elements_ && contents.scalar_type() == dtype_);
  contents_ = std::move(contents);
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  refuses_access(storage) = false;
  storage.set_data_ptr_noswap(c10::DataPtr(contents_.mutable_data_ptr(), contents_.device()));
}

at::Tensor TaggedStorage::empty() {
  refuse_access(*storage_.unsafeGetStorageImpl(),
                text::concat("The parameters of '", name_,
                             "' are not in memory now, so their data has no address. Use them "
                             "through tensor operators. ",
                             owner_->advice()),
                device_);
  return std::exchange(contents_, {});
}

bool TaggedStorage::want_empty() noexcept {
  wanted_empty_.store(true);
  if (holds_.load() > 0) return true;
  wanted_empty_.store(false);
  return false;
}

c10::DataPtr TaggedStorage::allocate(std::size_t bytes) {
  throw ShardingError(text::concat("Something tried to resize the memory of the parameters of '",
                                   name_, "' to ", bytes, " bytes, which belongs to them all. ",
                                   owner_->advice()));
}

void TaggedStorage::copy_data(void*, const void*, std::size_t) const {
  throw ShardingError(text::concat("Something tried to copy the memory of the parameters of '",
                                   name_, "' as a whole. Copy the tensors instead."));
}

void set_tag(const at::Tensor& tensor, bool on) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::DispatchKeySet keys = on ? impl.key_set().add(kTag) : impl.key_set().remove(kTag);
  const at::Tensor same = tensor_over(tensor.storage(), keys, tensor.scalar_type(), tensor.sizes(),
                                      tensor.strides(), tensor.storage_offset());
  impl.shallow_copy_from(same.getIntrusivePtr());
}

void guard(const at::Tensor& tensor, bool on) {
  install();
  PolicyRecord* record = record_of(tensor);
  if (record != nullptr) record->guarded = on;
  if (on || record == nullptr) set_tag(tensor, on);
}

at::Tensor part_of_gradient(const at::Tensor& flat, at::IntArrayRef sizes, std::int64_t offset) {
  install();
  flat.storage().unsafeGetStorageImpl()->set_allocator(&PartOfGradient::instance());
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<std::int64_t>(sizes[d], 1);
  return tensor_over(flat.storage(), tagged_keys(flat.scalar_type(), flat.device()),
                     flat.scalar_type(), sizes, strides, flat.storage_offset() + offset);
}

bool is_part_of_gradient(const at::TensorBase& tensor) {
  return is_tagged(tensor) && tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl()->allocator() == &PartOfGradient::instance();
}

at::Tensor given_up(const at::Tensor& like, const char* message) {
  install();
  const at::Device meta(at::kMeta);
  c10::Storage storage(c10::Storage::use_byte_size_t(),
                       static_cast<std::size_t>(like.storage().nbytes()),
                       c10::DataPtr(nullptr, meta), &GivenUp::with_message(message),
                       /*resizable=*/true);
  refuse_access(*storage.unsafeGetStorageImpl(), message, meta);
  return tensor_over(storage, tagged_keys(like.scalar_type(), meta), like.scalar_type(),
                     like.sizes(), like.strides(), like.storage_offset());
}

bool is_given_up(const at::TensorBase& tensor) {
  if (!tensor.has_storage()) return false;
  const c10::Allocator* allocator = tensor.storage().unsafeGetStorageImpl()->allocator();
  return allocator != nullptr && typeid(*allocator) == typeid(GivenUp);
}

}  // namespace accelerate::intercept
