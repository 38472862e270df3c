/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_CERTIFICATES_H
#define KVD_TESTS_LIB_CERTIFICATES_H

/* Certificates for tests, in files NAME.pem and NAME.key of a folder. A failure ends the test. */

/*
 * names: as in openssl x509v3_config(5), "DNS:localhost,IP:127.0.0.1"; NULL: it signs others'.
 * issuer: the name of one that signs; NULL: itself. days: until it expires; negative: it has.
 */
void certificate_make(const char *folder, const char *name, const char *names, const char *issuer,
                      int days);

/* Another file with its key, LOCKED.key, that needs a passphrase. */
void certificate_lock_key(const char *folder, const char *name, const char *locked);

#endif
