#include <intercept/backward_end.hpp>

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>

namespace accelerate::intercept {
namespace {

// Lies in a callback that autograd runs when the pass has ended well, and destroys in any case.
class Token {
 public:
  explicit Token(std::function<void(bool)> over) : over_(std::move(over)) {}
  ~Token() {
    if (over_) over_(/*failed=*/true);
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  void call() { std::exchange(over_, nullptr)(/*failed=*/false); }

 private:
  std::function<void(bool)> over_;
};

}  // namespace

void when_backward_ends(std::function<void(bool failed)> over) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [token = std::make_shared<Token>(std::move(over))] { token->call(); });
}

}  // namespace accelerate::intercept
