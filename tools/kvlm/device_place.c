/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Finds out on which GPU a daemon has its pool. The UUID in the daemon's status line is looked up
 * among the GPUs that this process sees.
 */

#include "tools/kvlm/device_place.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "client/conn/conn.h"
#include "ipc/base/device.h"
#include "ipc/msg.h"
#include "tools/kvlm/refuse.h"

enum { UUID_TEXT = 36 };

static int digit(char c) {
        return isdigit((unsigned char)c) ? c - '0' : tolower((unsigned char)c) - 'a' + 10;
}

/* Parses 8-4-4-4-12 hexadecimal digits. */
static bool read_uuid(const char *text, struct cu_uuid *ret) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < UUID_TEXT; i++) {
                if (i == 8 || i == 13 || i == 18 || i == 23) {
                        if (text[i] != '-')
                                return false;
                        continue;
                }
                if (!isxdigit((unsigned char)text[i]))
                        return false;
                ret->bytes[n / 2] = (uint8_t)(n % 2 ? ret->bytes[n / 2] | digit(text[i]) :
                                                      digit(text[i]) << 4);
                n++;
        }
        return true;
}

bool device_find_uuid(const char *text, struct cu_uuid *ret) {
        for (size_t length = strlen(text); length >= UUID_TEXT; length--, text++)
                if (read_uuid(text, ret))
                        return true;
        return false;
}

static int ordinal_of(const struct cu_uuid *uuid, int *ret) {
        struct kvd_device device = {0};
        int r = kvd_device_open(&device, uuid);

        if (r < 0)
                return refuse(r, "the daemon's pool is in GPU memory: %s", device.why);
        *ret = device.ordinal;
        kvd_device_close(&device);
        return 1;
}

int device_of_pool(const char *socket, int *ordinal) {
        struct kvd_msg_daemon_info request = {};
        struct kvd_msg_daemon_info_reply reply = {0};
        struct conn *conn = NULL;
        struct cu_uuid uuid;
        bool found = false;
        char text[192];

        if (conn_open(socket, "kvlm", &conn) == 0 &&
            conn_call(conn, KVD_MSG_daemon_info, &request, &reply) == 0) {
                kvd_slice_copy(reply.device, text, sizeof text);
                found = device_find_uuid(text, &uuid);
        }
        conn_close(conn);
        return found ? ordinal_of(&uuid, ordinal) : 0;
}
