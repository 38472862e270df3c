/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Configures libssl, and translates its errors. libssl gets the contents of files, not their names:
 * the files were opened before the process switched to another user. It never prompts for a
 * passphrase.
 */

#include "daemon/process/remote/tls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define FILE_MOST (4 << 20) /* bytes; all authorities that a system trusts take about 256 KiB */

/* ---- errors ---------------------------------------------------------------------------------- */

static const char *last_words(void) {
        const char *words = ERR_reason_error_string(ERR_peek_error());

        return words ? words : "no error message from libssl";
}

int tls_why(struct ssl_st *ssl, struct kvd_why *why) {
        long verified = SSL_get_verify_result(ssl);
        unsigned long error = ERR_peek_error();

        if (verified != X509_V_OK)
                return kvd_refuse(why, -EPROTO, "certificate verify failed: %s",
                                  X509_verify_cert_error_string(verified));
        if (!SSL_is_init_finished(ssl) && ERR_GET_LIB(error) == ERR_LIB_SSL &&
            ERR_GET_REASON(error) == SSL_R_WRONG_VERSION_NUMBER)
                return kvd_refuse(why, -EPROTO, "it does not speak TLS");
        return kvd_refuse(why, -EPROTO, "TLS: %s", last_words());
}

static int refuse_file(struct kvd_why *why, const char *setting, const char *what) {
        return kvd_refuse(why, -EINVAL, "%s: %s: %s", setting, what, last_words());
}

/* ---- files ----------------------------------------------------------------------------------- */

struct contents {
        char *data; /* owned, perhaps secret */
        size_t n;
        BIO *pem; /* owned, over data */
};

static void contents_clear(struct contents *c) {
        BIO_free(c->pem);
        if (c->data)
                explicit_bzero(c->data, c->n);
        free(c->data);
}

static int read_contents(int fd, const char *setting, struct contents *c, struct kvd_why *why) {
        struct stat st;
        ssize_t n;

        if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > FILE_MOST)
                return kvd_refuse(why, -EINVAL, "%s: not a regular file of at most %d bytes",
                                  setting, FILE_MOST);
        c->data = sys->calloc(1, (size_t)st.st_size + 1);
        n = c->data ? pread(fd, c->data, (size_t)st.st_size, 0) : -1;
        if (n < 0)
                return kvd_refuse(why, negative_errno(), "%s: %s", setting, strerror(errno));
        c->n = (size_t)n;
        c->pem = BIO_new_mem_buf(c->data, (int)n);
        ERR_clear_error();
        return c->pem ? 0 : kvd_refuse(why, -ENOMEM, "%s: out of memory", setting);
}

/* Whether reading failed only because the file ended. */
static bool at_end(void) {
        unsigned long error = ERR_peek_last_error();

        return ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
}

static int no_passphrase(char *to, int size, int writes, void *data) {
        return -1;
}

/* ---- a context ------------------------------------------------------------------------------- */

static int trust_those(SSL_CTX *context, BIO *pem, struct kvd_why *why) {
        X509_STORE *store = SSL_CTX_get_cert_store(context);
        bool added = true;
        uint32_t n = 0;
        X509 *one;

        while (added && (one = PEM_read_bio_X509(pem, NULL, no_passphrase, NULL))) {
                added = X509_STORE_add_cert(store, one) == 1;
                X509_free(one);
                n++;
        }
        if (!added || !n || !at_end())
                return refuse_file(why, "remote_ca", "no certificates in PEM");
        X509_VERIFY_PARAM_set_flags(SSL_CTX_get0_param(context), X509_V_FLAG_PARTIAL_CHAIN);
        return 0;
}

static int trust(SSL_CTX *context, int fd, struct kvd_why *why) {
        _cleanup_(contents_clear) struct contents c = {0};
        int r;

        if (fd < 0) { /* if this fails, verification fails later */
                SSL_CTX_set_default_verify_paths(context);
                return 0;
        }
        r = read_contents(fd, "remote_ca", &c, why);
        return r < 0 ? r : trust_those(context, c.pem, why);
}

/* The certificates after the first one are its chain. */
static int show_certificate(SSL_CTX *context, int fd, struct kvd_why *why) {
        static const char setting[] = "remote_certificate";
        _cleanup_(contents_clear) struct contents c = {0};
        int r = read_contents(fd, setting, &c, why);
        X509 *one;
        bool good;

        if (r < 0)
                return r;
        one = PEM_read_bio_X509(c.pem, NULL, no_passphrase, NULL);
        good = one && SSL_CTX_use_certificate(context, one) == 1;
        X509_free(one);
        while (good && (one = PEM_read_bio_X509(c.pem, NULL, no_passphrase, NULL))) {
                good = SSL_CTX_add1_chain_cert(context, one) == 1;
                X509_free(one);
        }
        return good && at_end() ? 0 : refuse_file(why, setting, "no certificate in PEM");
}

static int prove_with_key(SSL_CTX *context, int fd, struct kvd_why *why) {
        static const char setting[] = "remote_certificate_key";
        _cleanup_(contents_clear) struct contents c = {0};
        int r = read_contents(fd, setting, &c, why);
        EVP_PKEY *key;

        if (r < 0)
                return r;
        key = PEM_read_bio_PrivateKey(c.pem, NULL, no_passphrase, NULL);
        if (!key)
                return refuse_file(why, setting, "no private key in PEM without a passphrase");
        r = SSL_CTX_use_PrivateKey(context, key) == 1 && SSL_CTX_check_private_key(context) == 1 ?
                    0 :
                    refuse_file(why, setting, "it does not match remote_certificate");
        EVP_PKEY_free(key);
        return r;
}

/* Keeps stricter rules of the system's configuration. */
static void set_rules(SSL_CTX *context) {
        if (SSL_CTX_get_min_proto_version(context) < TLS1_2_VERSION)
                SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
        SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION);
        SSL_CTX_set_mode(context,
                         SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
}

int tls_context_new(const struct tls_files *files, struct ssl_ctx_st **ret, struct kvd_why *why) {
        SSL_CTX *context = SSL_CTX_new(TLS_client_method());
        int r;

        *ret = NULL;
        if (!context)
                return kvd_refuse(why, -ENOMEM, "TLS: %s", last_words());
        set_rules(context);
        r = trust(context, files->ca, why);
        if (r == 0 && files->certificate >= 0)
                r = show_certificate(context, files->certificate, why);
        if (r == 0 && files->key >= 0)
                r = prove_with_key(context, files->key, why);
        ERR_clear_error();
        if (r < 0)
                SSL_CTX_free(context);
        else
                *ret = context;
        return r;
}

/* ---- a connection ---------------------------------------------------------------------------- */

static bool is_address(const char *host) {
        uint8_t address[16];

        return inet_pton(AF_INET, host, address) == 1 || inet_pton(AF_INET6, host, address) == 1;
}

static bool expect(SSL *ssl, const char *host) {
        if (is_address(host))
                return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host) == 1;
        SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
        return SSL_set1_host(ssl, host) == 1 && SSL_set_tlsext_host_name(ssl, host) == 1;
}

struct ssl_st *tls_new(struct ssl_ctx_st *context, const char *host) {
        SSL *ssl = SSL_new(context);

        if (ssl && expect(ssl, host))
                return ssl;
        SSL_free(ssl);
        return NULL;
}

bool tls_is_for(struct ssl_st *ssl, const char *host) {
        X509 *certificate = SSL_get0_peer_certificate(ssl);

        if (!certificate)
                return false;
        return (is_address(host) ?
                        X509_check_ip_asc(certificate, host, 0) :
                        X509_check_host(certificate, host, 0, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS,
                                        NULL)) == 1;
}
