#include "io/async_engine.hpp"

namespace accelerate::io {

std::unique_ptr<Engine> make_uring_engine(int, std::string& why_not) {
  why_not = "this library was built without liburing";
  return nullptr;
}

}  // namespace accelerate::io
