// The only file that sees gloo's interface, through the declarations in gloo_shim/.
#include "comm/gloo_backend.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>

namespace accelerate::comm {
namespace {

class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void abort() override {
    for (const auto& context : contexts_) context->closeConnections();
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout) {
  return c10::make_intrusive<GlooBackend>(store, rank, size,
                                          c10d::ProcessGroupGloo::Options::create_default(timeout));
}

c10::intrusive_ptr<c10d::Backend> check_calls(c10::intrusive_ptr<c10d::Backend> backend,
                                              c10::intrusive_ptr<c10d::Backend> notes) {
  return c10::make_intrusive<c10d::ProcessGroupWrapper>(std::move(backend), std::move(notes));
}

}  // namespace accelerate::comm
