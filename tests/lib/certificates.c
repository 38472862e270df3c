/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Made with libcrypto, because the openssl command cannot make a certificate that has expired. Keys
 * are of P-256, which is quick.
 */

#include "tests/lib/certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <sys/stat.h>

#include "tests/lib/mark.h"

#define DAY_S (24 * 3600l)

static FILE *file_of(const char *folder, const char *name, const char *ending, const char *mode) {
        char path[160];
        FILE *f;

        snprintf(path, sizeof path, "%s/%s.%s", folder, name, ending);
        f = fopen(path, mode);
        ck_assert_msg(f, "%s", path);
        return f;
}

static EVP_PKEY *key_of(const char *folder, const char *name) {
        FILE *f = file_of(folder, name, "key", "r");
        EVP_PKEY *key = PEM_read_PrivateKey(f, NULL, NULL, NULL);

        ck_assert_ptr_nonnull(key);
        fclose(f);
        return key;
}

static void write_key(EVP_PKEY *key, const char *folder, const char *name, const char *phrase) {
        FILE *f = file_of(folder, name, "key", "w");

        ck_assert_int_eq(fchmod(fileno(f), 0600), 0);
        ck_assert_int_eq(PEM_write_PrivateKey(f, key, phrase ? EVP_aes_256_cbc() : NULL, NULL, 0,
                                              NULL, (void *)phrase),
                         1);
        fclose(f);
}

static void add_extension(X509 *one, int nid, const char *value) {
        X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, NULL, nid, value);

        ck_assert_ptr_nonnull(extension);
        ck_assert_int_eq(X509_add_ext(one, extension, -1), 1);
        X509_EXTENSION_free(extension);
}

static void fill(X509 *one, const char *name, const char *names, int days) {
        static long serial;
        X509_NAME *subject = X509_get_subject_name(one);

        ck_assert_int_eq(X509_set_version(one, X509_VERSION_3), 1);
        ASN1_INTEGER_set(X509_get_serialNumber(one), ++serial);
        X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, (const uint8_t *)name, -1, -1, 0);
        X509_gmtime_adj(X509_getm_notBefore(one), -30 * DAY_S);
        X509_gmtime_adj(X509_getm_notAfter(one), days * DAY_S);
        if (names)
                add_extension(one, NID_subject_alt_name, names);
        else
                add_extension(one, NID_basic_constraints, "critical,CA:TRUE");
}

static void sign(X509 *one, EVP_PKEY *own, const char *folder, const char *issuer) {
        EVP_PKEY *key = own;
        X509 *by = one;
        FILE *f;

        if (issuer) {
                f = file_of(folder, issuer, "pem", "r");
                by = PEM_read_X509(f, NULL, NULL, NULL);
                fclose(f);
                key = key_of(folder, issuer);
        }
        ck_assert_int_eq(X509_set_issuer_name(one, X509_get_subject_name(by)), 1);
        ck_assert_int_gt(X509_sign(one, key, EVP_sha256()), 0);
        if (issuer) {
                X509_free(by);
                EVP_PKEY_free(key);
        }
}

static void write_both(X509 *one, EVP_PKEY *key, const char *folder, const char *name) {
        FILE *f = file_of(folder, name, "pem", "w");

        ck_assert_int_eq(PEM_write_X509(f, one), 1);
        fclose(f);
        write_key(key, folder, name, NULL);
}

void certificate_make(const char *folder, const char *name, const char *names, const char *issuer,
                      int days) {
        EVP_PKEY *key = EVP_EC_gen("P-256");
        X509 *one = X509_new();

        ck_assert(key && one);
        fill(one, name, names, days);
        ck_assert_int_eq(X509_set_pubkey(one, key), 1);
        sign(one, key, folder, issuer);
        write_both(one, key, folder, name);
        X509_free(one);
        EVP_PKEY_free(key);
}

void certificate_lock_key(const char *folder, const char *name, const char *locked) {
        EVP_PKEY *key = key_of(folder, name);

        write_key(key, folder, locked, "sesame");
        EVP_PKEY_free(key);
}
