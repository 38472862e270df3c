/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvd_error() gives the line of this thread's last failed call. Threads do not see each other's
 * failures, and a call that succeeds leaves the line as it was.
 */

#include "client/conn/error.h"

#include "client/kvd.h"

_Thread_local struct kvd_why client_why;

const char *kvd_error(void) {
        return client_why.line;
}

const char *kvd_version(void) {
        return KVD_VERSION;
}
