#pragma once

#include <chrono>

// The part of gloo's interface that c10d/ProcessGroupGloo.hpp needs. LibTorch contains gloo and
// ships no headers of it. Nothing here is ever constructed or derived from by us: objects of these
// types are LibTorch's own, reached through pointers, and only non-virtual members are named.
namespace gloo {

namespace transport {
class UnboundBuffer;
}

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  /// Closes the connections to every peer; operations under way fail at once, here and there.
  void closeConnections();
};

}  // namespace gloo
