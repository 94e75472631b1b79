// Does not compile: the library knows nothing of the tensors in this batch. See CMakeLists.txt.
#include <accelerate/data/detail/loader_impl.hpp>

struct Batch {
  at::Tensor tokens;
};

accelerate::data::detail::LoaderImpl<Batch>* loader() { return nullptr; }
std::size_t size() { return sizeof(accelerate::data::detail::LoaderImpl<Batch>); }
