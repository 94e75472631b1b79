#pragma once

#include "net/store_client.hpp"
#include "net/store_server.hpp"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>

namespace accelerate::comm {

/// The run's own store, as c10d has stores. Unlike c10d's TCPStore it lets in only those who hold
/// the run's secret, and a thread that waits in it holds up no other. Times out with
/// c10d::DistStoreError and says c10d::DistNetworkError when rank 0, which keeps it, is gone.
c10::intrusive_ptr<c10d::Store> make_run_store(std::shared_ptr<net::StoreClient> client,
                                               std::shared_ptr<net::StoreServer> server,
                                               std::chrono::milliseconds timeout);

}  // namespace accelerate::comm
