/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_CERTIFICATES_H
#define KVD_TESTS_LIB_CERTIFICATES_H

/* Certificates for tests, in files NAME.pem and NAME.key of a folder. A failure ends the test. */

/*
 * names: as in openssl x509v3_config(5), "DNS:localhost,IP:127.0.0.1"; NULL: a CA certificate.
 * issuer: the name of the CA certificate that signs this one; NULL: self-signed. days: until it
 * expires; negative: it has expired.
 */
void certificate_make(const char *folder, const char *name, const char *names, const char *issuer,
                      int days);

/* Writes the key again as LOCKED.key, which needs a passphrase. */
void certificate_lock_key(const char *folder, const char *name, const char *locked);

#endif
