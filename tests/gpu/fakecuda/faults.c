/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/driver.h"

static const char *const work_names[N_WORK] = {"copy",  "set",     "kernel", "host",
                                               "write", "context", "other"};

struct fault {
        char name[48];
        unsigned n;
        cu_result error;
};

struct fake_settings fake_settings = {.devices = 1,
                                      .version = 13000,
                                      .memory = UINT64_C(16) << 30,
                                      .group = "all",
                                      .vmm = true,
                                      .legacy = true,
                                      .stream_order = true};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct fault faults[32];
static unsigned n_faults;
static unsigned delay_ms[N_WORK];
static const char *waits = ""; /* FAKECUDA_WAITS */
static int log_fd = -1;

static _Noreturn void bad_setting(const char *name, const char *text) {
        fprintf(stderr, "fakecuda: cannot make sense of %s=%s\n", name, text);
        abort();
}

static uint64_t number(const char *name, uint64_t otherwise) {
        const char *text = getenv(name);
        char *end;
        uint64_t n;

        if (!text)
                return otherwise;
        n = strtoull(text, &end, 10);
        for (const char *unit = "KMG"; *end && *unit; unit++)
                if (*end == *unit) {
                        n <<= 10 * (unit - (const char *)"KMG" + 1);
                        end++;
                        break;
                }
        if (end == text || *end)
                bad_setting(name, text);
        return n;
}

static void read_faults(const char *text) {
        int used;

        for (const char *at = text; at && *at; at += used + (at[used] == ',')) {
                struct fault *f = &faults[n_faults++];

                if (n_faults > ARRAY_SIZE(faults) ||
                    sscanf(at, "%47[a-zA-Z0-9]:%u=%d%n", f->name, &f->n, &f->error, &used) != 3 ||
                    (at[used] && at[used] != ','))
                        bad_setting("FAKECUDA_FAIL", text);
        }
}

static void read_delays(const char *text) {
        char name[16];
        unsigned ms, work;
        int used;

        for (const char *at = text; at && *at; at += used + (at[used] == ',')) {
                if (sscanf(at, "%15[a-z]:%u%n", name, &ms, &used) != 2 ||
                    (at[used] && at[used] != ','))
                        bad_setting("FAKECUDA_SLOW", text);
                for (work = 0; work < N_WORK && strcmp(name, work_names[work]) != 0; work++)
                        continue;
                if (work == N_WORK)
                        bad_setting("FAKECUDA_SLOW", text);
                delay_ms[work] = ms;
        }
}

static void read_once(void) {
        const char *wake = getenv("FAKECUDA_WAKE"), *log = getenv("FAKECUDA_LOG"),
                   *group = getenv("FAKECUDA_GROUP"), *alone = getenv("FAKECUDA_FREE");

        if (wake && strcmp(wake, "write") != 0)
                bad_setting("FAKECUDA_WAKE", wake);
        if (alone && strcmp(alone, "alone") != 0)
                bad_setting("FAKECUDA_FREE", alone);
        if (group && sscanf(group, "%16[a-z0-9]%c", fake_settings.group, &(char){0}) != 1)
                bad_setting("FAKECUDA_GROUP", group);
        fake_settings.devices = (int)number("FAKECUDA_DEVICES", 1);
        if (fake_settings.devices > FAKE_DEVICES)
                bad_setting("FAKECUDA_DEVICES", "more than 8");
        fake_settings.version = (int)number("FAKECUDA_VERSION", 13000);
        fake_settings.memory = number("FAKECUDA_MEMORY", UINT64_C(16) << 30);
        fake_settings.depth = number("FAKECUDA_DEPTH", 0);
        fake_settings.slice = number("FAKECUDA_SLICE", 0);
        fake_settings.shared = number("FAKECUDA_SHARED", 227 << 10);
        fake_settings.context = number("FAKECUDA_CONTEXT", 0);
        fake_settings.mig = number("FAKECUDA_MIG", 0);
        fake_settings.outlives = number("FAKECUDA_OUTLIVES", 0);
        fake_settings.shared_memory = getenv("FAKECUDA_MEMORY");
        fake_settings.vmm = number("FAKECUDA_VMM", 1);
        fake_settings.legacy = number("FAKECUDA_LEGACY", 1);
        fake_settings.reuse_handles = number("FAKECUDA_REUSE", 0);
        fake_settings.stream_order = number("FAKECUDA_STREAM_ORDER", 1);
        fake_settings.only_writes_wake = wake;
        fake_settings.free_alone = alone;
        fake_settings.strict = number("FAKECUDA_STRICT", 0);
        waits = getenv("FAKECUDA_WAITS") ?: "";
        read_faults(getenv("FAKECUDA_FAIL"));
        read_delays(getenv("FAKECUDA_SLOW"));
        if (log)
                log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (log && log_fd < 0)
                bad_setting("FAKECUDA_LOG", log);
}

void fake_read_settings(void) {
        pthread_once(&once, read_once);
}

static void write_log(const char *name, cu_result injected) {
        char line[96];
        int n;

        if (log_fd < 0)
                return;
        n = injected ? snprintf(line, sizeof line, "%d %s = %d\n", getpid(), name, injected) :
                       snprintf(line, sizeof line, "%d %s\n", getpid(), name);
        if (write(log_fd, line, (size_t)n) != n)
                fprintf(stderr, "fakecuda: cannot write the log: %s\n", strerror(errno));
}

cu_result fake_fault(const char *name, unsigned n) {
        for (unsigned i = 0; i < n_faults; i++)
                if (faults[i].n == n && strcmp(faults[i].name, name) == 0)
                        return faults[i].error;
        return CU_OK;
}

static cu_result injected(struct fake_entry *entry) {
        cu_result error = fake_fault(entry->name, ++entry->calls);
        struct device *device = fake_current();

        write_log(entry->name, error);
        if ((error == CU_ILLEGAL_ADDRESS || error == CU_LAUNCH_FAILED) && device) {
                pthread_mutex_lock(&fake.lock);
                fake_break(device, error);
                pthread_mutex_unlock(&fake.lock);
        }
        return error;
}

static bool is_listed(const char *name, const char *list) {
        size_t n = strlen(name);

        for (const char *at = strstr(list, name); at; at = strstr(at + 1, name))
                if ((at == list || at[-1] == ',') && (at[n] == ',' || !at[n]))
                        return true;
        return false;
}

static void wait_for_context(void) {
        struct device *device = fake_current();

        pthread_mutex_lock(&fake.lock);
        if (device)
                stream_wait_all(device);
        pthread_mutex_unlock(&fake.lock);
}

static cu_result context_error(void) {
        const struct device *device = fake_current();

        if (!device)
                return CU_INVALID_CONTEXT;
        return device->broken ?: device->retained ? CU_OK : CU_CONTEXT_IS_DESTROYED;
}

cu_result fake_enter(struct fake_entry *entry, enum fake_needs needs) {
        cu_result error;

        fake_read_settings();
        error = injected(entry);
        if (error)
                return error;
        if (fake_in_host_function && needs != NEEDS_NOTHING)
                return CU_NOT_PERMITTED;
        if (needs >= NEEDS_INIT && fake.pid != getpid())
                return CU_NOT_INITIALIZED;
        if (unlikely(is_listed(entry->name, waits)))
                wait_for_context();
        return needs == NEEDS_CONTEXT ? context_error() : CU_OK;
}

/* Sleeps in pieces, since another process' turn may come in between. */
void fake_delay(enum fake_work work) {
        unsigned each = fake_settings.slice ? 1 : MAX(delay_ms[work], 1);

        for (unsigned ms = 0; ms < delay_ms[work]; ms += each) {
                struct timespec left = {.tv_sec = each / 1000, .tv_nsec = each % 1000 * 1000000L};

                while (nanosleep(&left, &left) < 0)
                        continue;
                turn_look();
        }
}
