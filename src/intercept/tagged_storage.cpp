#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/intercept/tagged_storage.hpp>

#include <c10/core/TensorImpl.h>

#include <typeinfo>

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

// Stands in for a TaggedStorage that is gone.
class GivenUp final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t) override { throw StateError(kMessage); }
  void copy_data(void*, const void*, std::size_t) const override { throw StateError(kMessage); }
  static constexpr const char* kMessage =
      "A parameter (or a view of one, or a graph that saved one) was used after the strategy that "
      "sharded its module "
      "was destroyed, so its values are gone from this process. Keep the prepared module alive for "
      "as long as its "
      "parameters are used, or restore the parameters before you let it go.";
  static GivenUp& instance() {
    static GivenUp* const one = new GivenUp;  // storages may outlive static destruction
    return *one;
  }
};

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
  refuse_access(*storage_.unsafeGetStorageImpl(), GivenUp::kMessage, device_);
  storage_.unsafeGetStorageImpl()->set_allocator(&GivenUp::instance());
}

TaggedStorage* TaggedStorage::of(const at::TensorBase& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) return nullptr;
  c10::Allocator* allocator = impl->unsafe_storage().unsafeGetStorageImpl()->allocator();
  if (allocator == nullptr) return nullptr;
  const std::type_info& type = typeid(*allocator);
  if (type == typeid(TaggedStorage)) return static_cast<TaggedStorage*>(allocator);
  if (type == typeid(GivenUp)) throw StateError(GivenUp::kMessage);
  return nullptr;
}

at::Tensor TaggedStorage::view(at::IntArrayRef sizes, at::IntArrayRef strides,
                               std::int64_t offset) const {
  c10::DispatchKeySet keys(c10::computeDispatchKey(dtype_, c10::Layout::Strided, device_));
  keys = keys | c10::getAutogradRelatedKeySetFromBackend(keys.highestBackendKey()) |
         c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) | c10::DispatchKeySet(kTag);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(storage_), keys, c10::scalarTypeToTypeMeta(dtype_));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

void TaggedStorage::fill(at::Tensor contents) {
  TORCH_INTERNAL_ASSERT(contents.numel() == elements_ && contents.scalar_type() == dtype_);
  contents_ = std::move(contents);
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  refuses_access(storage) = false;
  storage.set_data_ptr_noswap(c10::DataPtr(contents_.mutable_data_ptr(), contents_.device()));
}

at::Tensor TaggedStorage::empty() {
  refuse_access(
      *storage_.unsafeGetStorageImpl(),
      text::concat(
          "The parameters of '", name_,
          "' are sharded or offloaded and not in memory now, so their data has no address. Use "
          "them through "
          "tensor operators, or open summon_full_params() around code that reads raw memory."),
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
  throw ShardingError(
      text::concat("Something tried to resize the storage of the sharded parameters of '", name_,
                   "' to ", bytes, " bytes. Change a parameter's shape before prepare()."));
}

void TaggedStorage::copy_data(void*, const void*, std::size_t) const {
  throw ShardingError(
      text::concat("Something tried to copy the storage of the sharded parameters of '", name_,
                   "' as a whole. Copy the tensors instead."));
}

}  // namespace accelerate::intercept
