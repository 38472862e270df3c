// SPDX-License-Identifier: Apache-2.0

// The C API of Mooncake Store over the client in its Python package, which has no C API. The
// declarations of that client below are the ones that are used here, as of release 0.3.13.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/process/remote/mooncake_library.h"

namespace mooncake {
class TransferEngine;

struct ReplicateConfig { // the defaults; newer members would be zeros
        size_t replicas = 1, others[2] = {};
        uint8_t soft_pin = 0;
        std::optional<uint64_t> soft_pin_ms;
        bool hard_pin = false;
        std::vector<std::string> preferred;
        std::string preferred_one;
        std::vector<std::string> preferred_others;
        bool same_node = false;
        uint8_t type = 0;
        std::string host;
        std::optional<std::vector<std::string>> groups;
        char rest[256] = {};
};

class RealClient {
    public:
        static std::shared_ptr<RealClient> create();
        int setup_real(const std::string &host, const std::string &metadata, size_t segment,
                       size_t buffer, const std::string &protocol, const std::string &devices,
                       const std::string &master, const std::shared_ptr<TransferEngine> &engine,
                       const std::string &socket, bool offload, const std::string &offload_path,
                       const std::string &tenant, bool http, int http_port);
        int tearDownAll();
        int register_buffer(void *buffer, size_t size);
        int unregister_buffer(void *buffer);
        std::vector<int> batchIsExist(const std::vector<std::string> &keys);
        std::vector<int64_t> batch_get_into(const std::vector<std::string> &keys,
                                            const std::vector<void *> &buffers,
                                            const std::vector<size_t> &sizes);
        std::vector<int> batch_put_from(const std::vector<std::string> &keys,
                                        const std::vector<void *> &buffers,
                                        const std::vector<size_t> &sizes,
                                        const ReplicateConfig &config);
};
} // namespace mooncake

using client = std::shared_ptr<mooncake::RealClient>;
using names = std::vector<std::string>;
using places = std::vector<void *>;
using counts = std::vector<size_t>;

#define PROTOTYPE(type, name, parameters) \
        extern "C" __attribute__((visibility("default"))) type mooncake_store_##name parameters;
MOONCAKE_CALLS(PROTOTYPE)

static mooncake::RealClient *of(void *store) {
        return static_cast<client *>(store)->get();
}

template <typename T>
static int copy(const std::vector<T> &from, T *to, size_t n) {
        for (size_t i = 0; i < n; i++)
                to[i] = i < from.size() ? from[i] : MOONCAKE_INTERNAL_ERROR;
        return 0;
}

void *mooncake_store_create() {
        return new client(mooncake::RealClient::create());
}

void mooncake_store_destroy(void *store) {
        of(store)->tearDownAll();
        delete static_cast<client *>(store);
}

int mooncake_store_setup(void *store, const char *host, const char *metadata, uint64_t segment,
                         uint64_t buffer, const char *protocol, const char *devices,
                         const char *master) {
        return of(store)->setup_real(host, metadata, segment, buffer, protocol, devices, master,
                                     nullptr, "", false, "", "default", false, 0);
}

int mooncake_store_register_buffer(void *store, void *buffer, size_t size) {
        return of(store)->register_buffer(buffer, size);
}

int mooncake_store_unregister_buffer(void *store, void *buffer) {
        return of(store)->unregister_buffer(buffer);
}

int mooncake_store_batch_is_exist(void *store, const char **keys, size_t n, int *results) {
        return copy(of(store)->batchIsExist(names(keys, keys + n)), results, n);
}

int mooncake_store_batch_put_from(void *store, const char **keys, void **buffers,
                                  const size_t *sizes, size_t n, const void *, int *results) {
        return copy(of(store)->batch_put_from(names(keys, keys + n), places(buffers, buffers + n),
                                              counts(sizes, sizes + n), {}),
                    results, n);
}

int mooncake_store_batch_get_into(void *store, const char **keys, void **buffers,
                                  const size_t *sizes, size_t n, int64_t *results) {
        return copy(of(store)->batch_get_into(names(keys, keys + n), places(buffers, buffers + n),
                                              counts(sizes, sizes + n)),
                    results, n);
}
